"""SGLang's page pools, and how their pages become values and come back."""
