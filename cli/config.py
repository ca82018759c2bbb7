"""`kvtide config`: check a connector configuration before an engine reads it, and print its schema."""

from __future__ import annotations

import json

import click
import msgspec
import yaml
from rich.console import Console

from kvtide.connectors.config import load_config, open_store, schema, settings_tree, store_settings

from .options import json_option


@click.group(name="config")
def command() -> None:
    """Check connector configurations, and print what they may hold.

    \b
    Examples:
      kvtide config check kv.yaml
      kvtide config check --open '{"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "kv"}}'
      kvtide config schema > kv.schema.json
    """


@command.command()
@click.argument("file")
@click.option("--open", "opens", is_flag=True, help="Open the store too, which may create its folder or connect to it.")
@json_option
def check(file: str, opens: bool, as_json: bool) -> None:
    """Check FILE: a JSON or YAML file, or JSON text; environment overrides are applied first.

    \b
    Examples:
      kvtide config check kv.yaml
      kvtide config check --open kv.yaml
      KVTIDE_CONFIG__KV_ROLE=kv_consumer kvtide config check kv.yaml --json
    """
    config = load_config(file)
    settings = store_settings(config.kv_connector, config.kv_connector_extra_config, config.kv_connector_module_path)
    if opens:
        open_store(config).close()
    found = {**msgspec.to_builtins(config), "kv_connector_extra_config": settings_tree(settings)}
    if as_json:
        click.echo(json.dumps({"valid": True, "opened": opens, "config": found}))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{config.kv_connector}: the configuration is valid{', and the store opens' if opens else ''}.")
    console.print("Settings, defaults included:")
    console.print(yaml.safe_dump(found["kv_connector_extra_config"], sort_keys=False), markup=False, end="")


@command.command(name="schema")
def print_schema() -> None:
    """Print a JSON schema of the configuration, with the settings of every store that is installed.

    \b
    Examples:
      kvtide config schema > kv.schema.json
    """
    click.echo(json.dumps(schema(), indent=2))
