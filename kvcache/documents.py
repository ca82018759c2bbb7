"""Reading a JSON or YAML document from disk, and showing a foreign value in an error message.

`hf_config`, `yaml_layout` and `presets` come here with what a user handed them: a path, a folder, or a mapping that is
already parsed. They get back a `Document` (an object with string keys, and the names to call it by), or a one-sentence
`ConfigError` that names the file, and the line where the text is broken. Nothing here knows what the keys mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError

Input = str | PathLike[str] | Mapping[str, Any]

# A config is a few KiB; a checkpoint given by mistake is gigabytes and must not be read into memory. YAML takes ten
# seconds a MiB.
_MAX_BYTES = {"JSON": 16 * 2**20, "YAML": 2**20}


class Document(NamedTuple):
    """One parsed object. `label` names it in errors, `place` in provenance, `stem` is a model name taken from the path.

    `stem` is None when the object did not come from a file.
    """

    data: Mapping[str, Any]
    label: str
    place: str
    stem: str | None


def read_json(source: Input, file_name: str) -> Document:
    """A JSON object from a path, from `file_name` in a folder, or from a mapping; `ConfigError` when it is none."""
    return _read(source, file_name, "JSON", _parse_json)


def read_yaml(source: Input, file_name: str) -> Document:
    """A YAML mapping from a path, from `file_name` in a folder, or from a mapping; `ConfigError` when it is none."""
    return _read(source, file_name, "YAML", _parse_yaml)


def _read(source: Input, file_name: str, language: str, parse: Callable[[str, str], Any]) -> Document:
    if isinstance(source, Mapping):
        return Document(_require_object(source, "the given mapping", language), "the given mapping", "mapping", None)
    try:
        path = Path(source)
        stem = path.stem
        if path.is_dir():
            stem = _model_name(path)
            path = path / file_name
            if not path.exists():
                raise ConfigError(f"folder {str(path.parent)!r} holds no {file_name}")
        elif path.name == file_name:
            stem = _model_name(path.parent)
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file; a {language} config is one")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES[language] + 1)
        if len(content) > _MAX_BYTES[language]:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES[language]} bytes; a {language} config is not")
        text = content.decode("utf-8-sig")
    except TypeError:
        raise ConfigError(f"cannot read {shown(source)}; give a path, a folder or a mapping") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not {language}: byte {error.start} is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read {shown(str(source))}: {reason}") from None
    if not text.strip():
        raise ConfigError(f"{path} is empty; it must hold a {language} object")
    try:
        parsed = parse(text, str(path))
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a config") from None
    return Document(_require_object(parsed, str(path), language), str(path), path.name, stem)


def _model_name(folder: Path) -> str:
    """A folder's name, or the model's where the folder is a snapshot in the Hugging Face cache."""
    folder = folder.absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


def _parse_json(text: str, label: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{label}, line {error.lineno}: not JSON ({error.msg})") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{label} is not a usable JSON config: {error}") from None


def _parse_yaml(text: str, label: str) -> Any:
    import yaml  # here, since most never read any

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{label}, line {line}: not YAML ({error.problem or error.context})") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{label} is not YAML: {' '.join(str(error).split())}") from None


def _require_object(value: Any, label: str, language: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{label} holds {shown(value)}, not a {language} object")
    if not value:
        raise ConfigError(f"{label} is empty; it must hold a {language} object with the fields of a model")
    odd = [key for key in value if not isinstance(key, str)]
    if odd:
        raise ConfigError(f"{label} has the key {shown(odd[0])}; every key must be text")
    return value


def shown(value: object) -> str:
    """A foreign value for an error message: short, on one line, whatever its size."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if value is None:
        return "null"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
