"""What is fuzzed: for every reader of foreign input a strategy, and a call that may only succeed or refuse.

A call gets one example and an empty folder. `KvtideError` with a sentence on one line is a refusal; everything else
that is raised is a finding, and so is a wrong answer, which the call asserts.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import seeds
import xxhash
import yaml
from hypothesis import strategies as st
from mutations import HUGE, as_text, edges, edited_bytes, edited_json, random_json, values

from kvtide.cli import main as command_line
from kvtide.connectors import config as connector_config
from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector
from kvtide.connectors.registry import BUILT_IN
from kvtide.connectors.segment_store.recovery import State, _boot, save_state
from kvtide.connectors.shared_storage import SharedStorageConfig, SharedStorageConnector
from kvtide.kvcache import KvtideError, ModelLayout, preset_names
from kvtide.kvcache.policies import POLICIES, plan_geometry
from kvtide.offload.codecs import CODECS, codec_named
from kvtide.offload.conformance import key_of, value_of
from kvtide.offload.sealing import landing, seal, unseal
from kvtide.offload.store import Status, Store
from kvtide.offload.values import BadValue, parse_header
from kvtide.sims.serving.calibrate import deployment_of, read_run
from kvtide.sims.serving.gpus import gpu_of
from kvtide.sims.serving.speculation import read_speculative_config
from kvtide.sims.serving.work import read_work
from kvtide.sims.traces import FORMATS, open_trace

MAX_MESSAGE = 2000


class Target(NamedTuple):
    """Examples, what is done with one, and how many are tried in the quick profile."""

    examples: st.SearchStrategy[Any]
    call: Callable[[Any, Path], None]
    quick: int


class NotOneSentence(AssertionError):
    """A refusal that is empty, long, or of several lines."""


def refused(error: BaseException) -> None:
    """Check the words of a refusal."""
    message = str(error)
    if not message.strip() or len(message) > MAX_MESSAGE or "\n" in message.strip():
        raise NotOneSentence(f"{type(error).__name__}: {message[:300]!r} ({len(message)} characters)") from error


# Models ---------------------------------------------------------------------------------------------------------------


def read_model(example: Any, folder: Path) -> None:
    """`config.json` or `params.json`, as a file or as an object."""
    data, as_file, is_params = example
    source: Any = data
    if as_file:
        source = folder / ("params.json" if is_params else "config.json")
        source.write_bytes(data if isinstance(data, bytes) else as_text(data).encode("utf-8", "surrogatepass"))
    elif not isinstance(data, dict):
        return
    layout = ModelLayout.from_mistral_params(source) if is_params else ModelLayout.from_hf(source)
    use_layout(layout)


def read_layout(example: Any, folder: Path) -> None:
    """A layout written by hand."""
    source = example
    if isinstance(example, bytes):
        source = folder / "layout.yaml"
        source.write_bytes(example)
    use_layout(ModelLayout.from_yaml(source))


def use_layout(layout: ModelLayout) -> None:
    """What everybody asks of a layout that was taken."""
    assert layout.bytes_per_token >= 0
    with contextlib.suppress(KvtideError):
        layout.shard(2)
    for policy in POLICIES:
        try:
            plan_geometry(policy, layout, 16, min_block_size=8)
        except KvtideError as error:
            refused(error)


# Connector configuration ----------------------------------------------------------------------------------------------

# No other module is ever imported for a name that the fuzzer made up.
SAFE_MODULES = ("json", "os.path", "nowhere", "", ".", "kvtide.connectors.lmdb", "kvtide.connectors.host")


def read_connector(example: Any, folder: Path) -> None:
    """`kv_transfer_config` as text, file, or object, with overrides from the environment."""
    data, how, environ = example
    source: Any = data
    if isinstance(data, bytes):
        source = folder / "config.yaml"
        source.write_bytes(data)
    elif how != "object":
        text = as_text(data) if how in ("text", "json") else yaml.safe_dump(data, allow_unicode=True)
        source = text if how == "text" else folder / f"config.{how}"
        if how != "text":
            source.write_bytes(text.encode("utf-8", "surrogatepass"))
    elif not isinstance(data, dict):
        return
    before = set(sys.modules)
    connector_config.load_config(source, environ=environ)
    assert not {"antigravity", "this"} & (set(sys.modules) - before)


def _connectors() -> st.SearchStrategy[Any]:
    names = [field.encode_name for field in msgspec.structs.fields(connector_config.TransferConfig)]
    for name in BUILT_IN:
        with contextlib.suppress(KvtideError):
            fields = msgspec.structs.fields(connector_config.store_class(name).Config)
            names += [field.encode_name for field in fields]
    modules = st.sampled_from([*BUILT_IN, *(f"{module}:Store" for module in SAFE_MODULES), "LMDB", "nowhere:"])

    def safe(data: Any) -> Any:
        if isinstance(data, dict):
            for key, default in (("kv_connector", "HostConnector"), ("kv_connector_module_path", "nowhere")):
                name = data.get(key)
                if isinstance(name, str) and name.partition(":")[0] not in (*BUILT_IN, *SAFE_MODULES):
                    data[key] = default if ":" in name or key != "kv_connector" else name
            for inner in data.values():
                safe(inner)
        elif isinstance(data, list):
            for inner in data:
                safe(inner)
        return data

    made_up = st.builds(
        lambda name, extra: {"kv_connector": name, "kv_connector_extra_config": extra}, modules, random_json(names)
    )
    data = (edited_json(seeds.CONNECTORS, names) | made_up | random_json(names)).map(safe)
    texts = edited_bytes([yaml.safe_dump(each).encode() for each in seeds.CONNECTORS]).filter(
        lambda text: b"odule_path" not in text and text.count(b"kv_connector:") == text.count(b"Connector\n")
    )
    bomb = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(10))
    odd = [
        "kv_connector: &a [*a]",
        bomb,
        bomb + "kv_connector: *a9",
        "kv_connector: {? [1]: 2}",
        "kv_port: 0x" + "f" * 5000,
    ]
    odd += [
        "kv_connector: HostConnector\nkv_connector_extra_config: {max_bytes: 0x" + "f" * 5000 + "}",
        "kv_role: 2024-13-45",
    ]
    odd += [f"kv_connector: HostConnector\nkv_role: 2\n{bomb}", f"{bomb}kv_connector: HostConnector\nkv_role: *a9\n"]
    texts |= st.sampled_from(odd).map(str.encode)
    variable = st.lists(
        st.sampled_from(names).map(str.upper) | st.sampled_from(["0", "CONNECTORS", "²", ""]), min_size=1, max_size=4
    )
    text = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
    number = edges.filter(lambda value: not isinstance(value, str | list | dict)).map(str_of)
    environ = st.dictionaries(
        variable.map(lambda words: connector_config.ENV_PREFIX + "__".join(words)).filter(
            lambda name: not name.endswith(("KV_CONNECTOR", "MODULE_PATH"))
        ),
        text
        | number
        | st.sampled_from(
            ["[" * 3000, "&a [*a]", "0x" + "f" * 5000, "2024-99-99", "{a: 1}", "[1, 2]", "!!python/object:os.system x"]
        ),
        max_size=2,
    )
    return st.tuples(data | texts, st.sampled_from(["text", "json", "yaml", "object"]), environ)


def str_of(value: Any) -> str:
    """A value as somebody would type it."""
    return str(value).replace(HUGE, "1" + "0" * 5000)


# Traces ---------------------------------------------------------------------------------------------------------------


def read_trace(example: Any, folder: Path) -> None:
    """Every format, found out or named, to the end or to some request."""
    data, options = example
    source = folder / "trace"
    if isinstance(data, bytes):
        source.write_bytes(data)
    else:
        source.mkdir()
        for name, content in data.items():
            (source / name).write_bytes(content)
    for number, request in enumerate(open_trace(source, **options)):
        assert 0 <= request.image_tokens <= request.input_tokens
        assert (request.reasoning_tokens or 0) <= request.output_tokens
        assert request.arrival_s >= 0
        if number > 3000:
            break


def _traces() -> st.SearchStrategy[Any]:
    rows = [json.loads(line) for text in seeds.TRACES.values() if text[0] == "{" for line in text.splitlines()]
    lines = st.lists(edited_json(rows).map(as_text), min_size=1, max_size=4).map("\n".join)
    files = edited_bytes(seeds.trace_files()) | lines.map(lambda text: text.encode("utf-8", "surrogatepass"))
    datasets = edited_json([seeds.SERVEGEN_DATASET]).map(lambda data: as_text(data).encode("utf-8", "surrogatepass"))
    datasets |= edited_bytes([json.dumps(seeds.SERVEGEN_DATASET).encode()])
    folders = st.fixed_dictionaries(
        {"chunk-0-dataset.json": datasets, "chunk-0-trace.csv": edited_bytes([seeds.SERVEGEN_CURVE.encode()])}
    )
    columns = st.sampled_from(
        [
            None,
            None,
            {"input": "ContextTokens", "output": "GeneratedTokens", "arrival": "TIMESTAMP"},
            {"input": "in"},
            {},
        ]
    )
    options = st.fixed_dictionaries(
        {},
        optional={
            "format": st.sampled_from([None, *(name for name in FORMATS if name != "demo")]),
            "columns": columns,
            "num_requests": st.sampled_from([None, 1, 0, 100]),
            "duration_s": st.sampled_from([None, 1.0, 0.0, float("nan"), float("inf"), 1e300]),
            "tokens_per_image": st.sampled_from([0, 256, -1, 1 << 40]),
            "seed": st.sampled_from([0, 1, -1, 1 << 64]),
        },
    )
    return st.tuples(files | folders, options)


def read_speculation(example: Any, folder: Path) -> None:
    """vLLM's speculative config, as an object or inline."""
    if isinstance(example, dict):
        read_speculative_config(example, n_predict=1)
    read_speculative_config(example if isinstance(example, str) else as_text(example), n_predict=1)


def read_recorded_run(example: Any, folder: Path) -> None:
    """A folder of `meta.json` and `requests.jsonl`, up to the deployment that it describes."""
    meta, requests = example
    (folder / "meta.json").write_bytes(meta)
    (folder / "requests.jsonl").write_bytes(requests)
    run = read_run(folder)
    config = seeds.TINY_CONFIG | {"vocab_size": 1000, "intermediate_size": 1024}
    deployment_of(run, ModelLayout.from_hf(config), read_work(config), gpu_of("h100")[0])


def _speculation() -> st.SearchStrategy[Any]:
    objects = edited_json(seeds.SPECULATIVE) | random_json([key for each in seeds.SPECULATIVE for key in each])
    odd = st.sampled_from(
        ["{a: 2024-13-45}", "{" * 3000, "{a: 0x" + "f" * 5000 + "}", "{? [1]: 2}", "{&a b: *a}", "{a: &a [*a]}"]
    )
    texts = edited_bytes([json.dumps(each).encode() for each in seeds.SPECULATIVE])
    return objects | odd | texts.map(lambda text: text.decode("utf-8", "replace"))


def _recorded_runs() -> st.SearchStrategy[Any]:
    def document(seed: dict[str, Any]) -> st.SearchStrategy[bytes]:
        text = json.dumps(seed).encode()
        return (
            edited_json([seed]).map(lambda data: as_text(data).encode("utf-8", "surrogatepass"))
            | edited_bytes([text])
            | st.just(text)
        )

    return st.tuples(document(seeds.RECORDED_META), document(seeds.RECORDED_REQUEST))


# Values and stores ----------------------------------------------------------------------------------------------------

SIZES = (1, 700, 5000, 70_000)
CODEC_NAMES = [name for name in CODECS if not name.startswith("fp8")]  # what comes back of those is not what went in
HEADER = struct.Struct("<4sHHQQQ32s16sQ")


def read_value(example: Any, folder: Path) -> None:
    """A header whose checksum is right whatever it says, and a payload whose digest is."""
    codec, raw_bytes, stored_bytes, payload, view_bytes = example
    fields = HEADER.pack(b"KVTV", 1, codec, raw_bytes, stored_bytes, 0, key_of(1), xxhash.xxh3_128_digest(payload), 0)
    data = fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")
    with contextlib.suppress(BadValue):
        header = parse_header(data, key_of(1), max_value_bytes=1 << 20)
        out = memoryview(bytearray(view_bytes))
        landing(header, out)
        unseal(header, memoryview(payload), out)


def _values() -> st.SearchStrategy[Any]:
    packed = [b"", b"\0" * 16]
    for name in CODECS:
        packed.append(bytes(seal(key_of(1), bytes(5000), codec_named(name))[1]))
    numbers = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 0xFFFF])
    lengths = st.sampled_from([0, 1, 4999, 5000, 5001, 1 << 20, 1 << 62, (1 << 64) - 1])
    found = st.tuples(numbers, lengths, lengths, edited_bytes(packed), st.sampled_from([0, 1, 5000, 1 << 20]))
    # Mostly the lengths agree, or nothing behind the header is ever reached.
    agreeing = st.tuples(numbers, st.sampled_from([1, 5000]), edited_bytes(packed)).map(
        lambda each: (each[0], each[1], len(each[2]), each[2], each[1])
    )
    return found | agreeing


def read_shared_file(example: Any, folder: Path) -> None:
    """A value's file on a shared file system, edited behind the store's back."""
    codec, edits, number = example
    with SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(folder / "kv"), codec=codec)) as store:
        fill(store)
        path = Path(store._tree.path(key_of(number)))
        path.write_bytes(edit(path.read_bytes(), edits))
        use_store(store, {Status.HIT, Status.CORRUPT, Status.MISS, Status.ERROR})


def read_lmdb(example: Any, folder: Path) -> None:
    """A file of an embedded store, edited while nobody had it open; the writer had closed it, or had been killed."""
    which, edits, is_clean, read_only = example
    path = folder / "kv"
    shutil.copytree(_lmdb_template(), path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    chosen = files[which % len(files)]
    if not is_clean:
        save_state(path, State(clean=False, boot=_boot()))
    chosen.write_bytes(edit(chosen.read_bytes(), edits))
    with LMDBConnector(_lmdb_config(path, read_only=read_only)) as store:
        use_store(store, set(Status))


def _lmdb_config(path: Path, *, read_only: bool = False) -> LMDBConfig:
    return LMDBConfig(path=str(path), max_bytes="4MiB", segment_bytes="256KiB", read_only=read_only, durability="none")


_made: list[Path] = []


def _lmdb_template() -> Path:
    if not _made:
        _made.append(Path.cwd() / "lmdb-template")
        with LMDBConnector(_lmdb_config(_made[0])) as store:
            fill(store)
            numbers = [key_of(number) for number in range(100, 400)]
            store.put(numbers, [b"x"] * len(numbers))
            store.delete(numbers[::2])
    return _made[0]


def fill(store: Store) -> None:
    """Put a value of every length."""
    keys = [key_of(number) for number in range(len(SIZES))]
    store.put(keys, [value_of(key, size) for key, size in zip(keys, SIZES, strict=True)])


def use_store(store: Store, allowed: set[Status]) -> None:
    """All that a store is asked; what it serves is right."""
    keys = [key_of(number) for number in range(len(SIZES))]
    for _ in range(2):
        list(store.scan())
        store.headers(keys)
        store.contains(keys)
        buffers = [bytearray(size) for size in SIZES]
        statuses = store.get_into(keys, buffers)
        assert set(statuses) <= allowed, statuses
        for key, size, buffer, status in zip(keys, SIZES, buffers, statuses, strict=True):
            assert status is not Status.HIT or buffer == value_of(key, size), "a wrong value was served"
        store.verify(keys)
        store.stats()
        store.gc()
        fill(store)
    new = [key_of(number) for number in range(1000, 1020)]
    store.put(new, [value_of(key, 30_000) for key in new])
    store.delete(new)


def edit(data: bytes, seed: int) -> bytes:
    """A file after edits that a seed stands for, most of them small."""
    rng = random.Random(seed)
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        at = rng.randrange(len(found) + 1)
        if rng.random() < 0.3:
            at = rng.choice([0, 4, 8, 16, 24, 40, 96, 4096, 4112]) % (len(found) + 1)
        kind = rng.randrange(6)
        if kind < 2 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            word = rng.choice([0, 1, 0xFFFF, 0xFFFFFFFF, rng.getrandbits(64)])
            found[at : at + 8] = word.to_bytes(8, "little")[: len(found) - at]
        elif kind == 3:
            end = min(at + rng.choice([16, 512, 4096]), len(found))
            found[at:end] = rng.randbytes(end - at)
        elif kind == 4:
            del found[at:]
        else:
            found[at:at] = rng.randbytes(rng.choice([1, 8, 4096]))
    return bytes(found)


# The command line -----------------------------------------------------------------------------------------------------


def run_command(example: Any, folder: Path) -> None:
    """The command in this process: exit code 0, or 2 and one sentence."""
    arguments, files = example
    for name, content in files.items():
        (folder / name).write_bytes(content)
    arguments = [each.replace("@", f"{folder}/") for each in arguments]
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["kvtide", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(folder):
            command_line.run()
        code: Any = 0
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = argv
    said = err.getvalue()
    assert code in (0, 2), (code, said)
    assert "not enough memory" not in said, said
    if code == 2 and len(arguments) > 1 and said.startswith("kvtide: "):
        assert len(said) < MAX_MESSAGE + 2 * max(map(len, arguments)), said[:300]
        assert said.count("\n") == 1, said


def _commands() -> st.SearchStrategy[Any]:
    models = [*preset_names()[:4], "gemma-3-27b", "@config.json", "@layout.yaml", "nowhere", "@", ""]
    files = {
        "config.json": edited_json(seeds.model_configs()).map(as_text).map(_utf8)
        | st.just(json.dumps(seeds.TINY_CONFIG).encode()),
        "layout.yaml": edited_bytes([seeds.LAYOUT_YAML.encode()]) | st.just(seeds.LAYOUT_YAML.encode()),
        "trace.jsonl": edited_bytes([seeds.TRACES["mooncake"].encode()]) | st.just(seeds.TRACES["mooncake"].encode()),
        "store.json": st.just(
            b'{"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "kv", "max_bytes": "8MiB"}}'
        ),
        "other.json": edited_json([seeds.CONNECTORS[1]], most=2)
        .map(as_text)
        .map(_utf8)
        .filter(lambda text: b":" in text and b"module" not in text),
    }
    texts = {
        "model": models,
        "trace": ["demo", "@trace.jsonl", "nowhere", "@", ""],
        "memory": ["80GiB", "1GiB", "1", "0", "1000TB", "-1GiB"],
        "policies": ["kvtide", "uniform", "lcm,kvtide", "x", ""],
        "policy": ["kvtide", "uniform", "lcm,kvtide", "x", ""],
        "gpu": ["h100", "a100", "h200", "nowhere", ""],
        "config": ["@store.json", "@other.json", "nowhere"],
        "file": ["@store.json", "@other.json", "nowhere"],
        "kv_dtype": ["auto", "bf16", "fp8", "fp8_ds_mla", "int4", ""],
        "speculative_config": [
            '{"method": "mtp", "num_speculative_tokens": 2}',
            '{"num_speculative_tokens": -1}',
            "{",
            "[]",
        ],
        "acceptance_rates": ["0.8,0.5", "1,1,1", "nan", ",", ""],
        "trace_columns": ["input=input_length,output=output_length", "input", "=,=", ""],
        "size": ["4KiB", "1MiB", "0", "x"],
        "total": ["64KiB", "1MiB", "0", "x"],
        "latent": ["512+64", "1", "0+0", "x"],
    }
    junk = st.sampled_from(
        ["", "-1", "0", "²", "x", "nan", "inf", "1e400", "9" * 30, "9" * 5000, "\udc80", "--", "-", "a" * 300]
    )
    numbers = st.sampled_from(
        [
            "1",
            "2",
            "3",
            "7",
            "16",
            "64",
            "1000",
            "131072",
            "0",
            "-1",
            "4294967296",
            "1099511627776",
            "99999999999999999999",
        ]
    )

    def one(param: click.Parameter) -> st.SearchStrategy[list[str]]:
        name = param.name or ""
        if getattr(param, "is_flag", False):
            return st.just([param.opts[0]])
        if isinstance(param.type, click.Choice):
            value = st.sampled_from([str(choice) for choice in param.type.choices])
        elif isinstance(param.type, click.types.IntParamType):
            value = numbers
        elif isinstance(param.type, click.types.FloatParamType):
            value = st.sampled_from(["0", "0.5", "0.92", "1", "1e9", "7e10", "-1", "nan", "inf", "1e-300", "1e300"])
        else:
            value = st.sampled_from(texts.get(name, ["@trace.jsonl", "@", "x"]))
        value = st.integers(0, 9).flatmap(lambda dice: junk if dice == 0 else value)
        if isinstance(param, click.Argument):
            return value.map(lambda text: [text])
        return value.map(lambda text: [param.opts[0], text])

    def arguments(path: list[str], command: click.Command) -> st.SearchStrategy[list[str]]:
        needed = [param for param in command.params if param.required]
        rest = [param for param in command.params if not param.required]
        # Few requests, or a run takes longer than it can find anything.
        few = [["--num-requests", "3"]] if any(param.name == "num_requests" for param in rest) else []
        chosen = (
            st.lists(st.sampled_from(rest), max_size=5, unique_by=lambda param: param.name) if rest else st.just([])
        )
        given = st.tuples(*(one(param) for param in needed))
        return st.tuples(given, chosen.flatmap(lambda params: st.tuples(*(one(param) for param in params)))).map(
            lambda parts: [*path, *(text for part in (*parts[0], *few, *parts[1]) for text in part)]
        )

    # These read nothing of others, and take seconds and gigabytes of addresses.
    names = [name for name in command_line.COMMANDS if name not in ("demo", "doctor")]
    strategies = [arguments(path, command) for path, command in _walk(command_line.cli, []) if path[0] in names]
    anything = st.lists(st.sampled_from([*names, "-h", "--version", "--json", "--", "x"]) | junk, max_size=4)
    found = st.one_of(*strategies, anything).filter(lambda words: not any("\0" in word for word in words))
    return st.tuples(found, st.fixed_dictionaries(files))


def _walk(command: click.Command, path: list[str]) -> Iterator[tuple[list[str], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from _walk(inner, [*path, name])


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _models() -> st.SearchStrategy[Any]:
    configs = seeds.model_configs()
    names = sorted({key for config in configs for key in config} | set(seeds.TINY_PARAMS))
    data = edited_json(configs) | random_json(names)
    data |= st.builds(
        lambda kind, rest: {**rest, "model_type": kind},
        st.sampled_from(sorted({c["model_type"] for c in configs})),
        random_json(names),
    )
    hf = st.tuples(data | edited_bytes([as_text(config).encode() for config in configs]), st.booleans(), st.just(False))
    params = st.tuples(
        edited_json([seeds.TINY_PARAMS]) | random_json([*seeds.TINY_PARAMS]), st.booleans(), st.just(True)
    )
    return hf | params


def _layouts() -> st.SearchStrategy[Any]:
    objects = edited_json(seeds.layouts()).filter(lambda data: isinstance(data, dict))
    texts = [yaml.safe_dump(layout).encode() for layout in seeds.layouts()]
    pattern = st.text("0123456789*(), fulocast", max_size=20) | values
    patterns = pattern.map(lambda text: {**yaml.safe_load(seeds.LAYOUT_YAML), "layers": text})
    return objects | edited_bytes([*texts, seeds.LAYOUT_YAML.encode()]) | patterns


def make_targets() -> dict[str, Callable[[], Target]]:
    """Targets by name; building a strategy reads what it starts from."""
    seed = st.integers(0, 2**48)
    return {
        "models": lambda: Target(_models(), read_model, 300),
        "layouts": lambda: Target(_layouts(), read_layout, 300),
        "connectors": lambda: Target(_connectors(), read_connector, 400),
        "traces": lambda: Target(_traces(), read_trace, 400),
        "speculation": lambda: Target(_speculation(), read_speculation, 300),
        "recorded runs": lambda: Target(_recorded_runs(), read_recorded_run, 300),
        "values": lambda: Target(_values(), read_value, 500),
        "shared files": lambda: Target(
            st.tuples(st.sampled_from(CODEC_NAMES), seed, st.integers(0, len(SIZES) - 1)), read_shared_file, 40
        ),
        "lmdb files": lambda: Target(
            st.tuples(st.integers(0, 1000), seed, st.booleans(), st.booleans()), read_lmdb, 20
        ),
        "commands": lambda: Target(_commands(), run_command, 60),
    }
