"""Reports of simulations: their figures as one JSON object, a page that needs no network, a request's story as text."""
