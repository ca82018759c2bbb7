"""The pictures of the concepts pages, drawn from what the real allocator does: nothing in them is made up.

Each function runs kvtide and draws what it finds. Run by every build of the documentation.
"""

from __future__ import annotations

import numpy as np
from svg import COLOURS, EMPTY, GRID, PALE, Svg

from kvtide.connectors.config import make_store
from kvtide.hma import HybridMemoryManager
from kvtide.hma.tables import NO_BLOCK
from kvtide.kvcache import FullAttention, Layer, ModelLayout, SlidingWindow
from kvtide.kvcache.policies import POLICIES, plan_geometry
from kvtide.kvcache.solver import solve_geometry
from kvtide.offload.manager import OffloadManager
from kvtide.offload.policies import LoadPolicy
from kvtide.offload.transfers import Transfers

MODEL = "gemma-3-27b"
WIDTH = 860
LEFT = 20


def pictures() -> dict[str, str]:
    """Every picture by file name below `generated/`."""
    drawn = {"groups": groups, "arena": arena, "windows": windows, "tiers": tiers, "waste": waste}
    return {f"pictures/{name}.svg": str(draw()) for name, draw in drawn.items()}


def groups() -> Svg:
    """A model's layers by group, and how each group's blocks are cut."""
    layout = ModelLayout.preset(MODEL)
    geometry = solve_geometry(layout)
    picture = Svg(WIDTH, f"The layers of {MODEL} by group, and the blocks of each group")
    colour = {group.name: COLOURS[at] for at, group in enumerate(layout.groups)}
    picture.text(LEFT, 26, f"{MODEL}: {len(layout.layers)} layers, each in the group of its spec", size=15)
    step = (WIDTH - 2 * LEFT) / len(layout.layers)
    for layer in layout.layers:
        name = next(group.name for group in layout.groups if layer.index in group.layers)
        picture.box(LEFT + layer.index * step, 40, step, 30, colour[name], tip=f"layer {layer.index}: {name}")
    picture.legend(LEFT, 92, colour)
    top = 124.0
    scale = (WIDTH - 2 * LEFT) / geometry.page_bytes
    picture.text(LEFT, top, f"one page: {geometry.page_bytes:,} bytes = {geometry.page_bytes // geometry.unit} units")
    for fmt in geometry.formats:
        top += 16
        width = fmt.block_bytes * scale
        for block in range(fmt.blocks_per_page):
            picture.box(LEFT + block * width, top, width, 34, colour[fmt.group.name], tip=f"{fmt.block_bytes:,} bytes")
        picture.text(
            LEFT,
            top + 52,
            f"{fmt.group.name}: {fmt.blocks_per_page} block{'s' * (fmt.blocks_per_page > 1)} of "
            f"{fmt.block_bytes:,} bytes = {fmt.block_size} tokens × {fmt.layers_per_block} "
            f"layer{'s' * (fmt.layers_per_block > 1)}, {fmt.tables} table{'s' * (fmt.tables > 1)}",
        )
        top += 62
    return picture


def arena() -> Svg:
    """The pages of a small pool while two requests run and the blocks of a third are cached."""
    layout = ModelLayout.preset(MODEL)
    geometry = solve_geometry(layout)
    pages = 28
    manager = HybridMemoryManager(geometry, geometry.page_bytes * pages, max_requests=4, max_model_len=4096)
    _run(manager, "cached", 40, release=True, start=9000)
    for name, tokens in (("A", 56), ("B", 96)):
        _run(manager, name, tokens, start=ord(name) * 100)
    holder: dict[int, str] = {}
    for name in ("A", "B"):
        for group in manager.groups:
            holder |= dict.fromkeys(group.table.ids_of(manager.row_of(name)).ravel().tolist(), name)
    picture = Svg(WIDTH, "The pages of an arena, and who holds their blocks")
    picture.text(LEFT, 26, f"an arena of {pages} pages of {geometry.page_bytes / 2**20:.2f} MiB ({MODEL})", size=15)
    colour = {group.name: COLOURS[at] for at, group in enumerate(manager.groups)}
    picture.legend(LEFT, 50, {**colour, "cached, no request holds it": "#c3cad2", "free": EMPTY})
    columns, height = 4, 26
    width = (WIDTH - 2 * LEFT - 16 * (columns - 1)) / columns
    for page in range(pages):
        row, column = divmod(page, columns)
        x, y = LEFT + column * (width + 16), 84 + row * (height + 18)
        picture.text(x, y - 4, f"page {page}", size=10, colour=PALE)
        owner = int(manager.pool.owner[page])
        if owner < 0:
            picture.box(x, y, width, height, EMPTY, stroke=GRID)
            continue
        fmt = manager.groups[owner].fmt
        cell = width * fmt.block_bytes / geometry.page_bytes
        for slot in range(fmt.blocks_per_page):
            block = page * manager.pool.stride + slot
            name = holder.get(block, "")
            cached = bool(manager.pool.cached[block])
            fill = colour[fmt.group.name] if name else "#c3cad2" if cached else EMPTY
            state = f"held by {name}" if name else "cached" if cached else "free"
            picture.box(x + slot * cell, y, cell, height, fill, tip=f"{fmt.group.name}, block {block}: {state}")
            if name:
                picture.text(x + (slot + 0.5) * cell, y + 17, name, size=11, colour="#ffffff", anchor="middle")
    return picture


def windows() -> Svg:
    """Which blocks a request holds while it grows: all of full attention, the window's last ones."""
    window, block, total = 64, 8, 240
    layout = _small(window)
    manager = HybridMemoryManager(
        plan_geometry("kvtide", layout, block, min_block_size=block),
        "4MiB",
        max_requests=1,
        max_model_len=512,
        prefix_caching=False,
    )
    row = manager.admit("A", np.arange(total + 1)).row
    picture = Svg(WIDTH, "Blocks held while a request grows")
    picture.text(
        LEFT,
        26,
        f"blocks that one request holds, {block} tokens a step; window of {window}, blocks of {block}",
        size=15,
    )
    blocks = -(-total // block)
    cell = (WIDTH - 2 * LEFT - 230) / (2 * blocks)
    height = 11
    names = [group.name for group in manager.groups]
    colour = {name: COLOURS[at] for at, name in enumerate(names)}
    lefts = {name: LEFT + 92 + at * (blocks * cell + 100) for at, name in enumerate(names)}
    for name in names:
        picture.text(lefts[name], 52, f"{name}: block 0 … {blocks - 1}")
    y = 62.0
    for _ in range(blocks):
        manager.reserve([row], [block])
        manager.commit([row], [block])
        committed = int(manager.committed[row])
        picture.text(LEFT + 84, y + 9, f"{committed} tokens", size=10, colour=PALE, anchor="end")
        for group in manager.groups:
            logical, entries = group.table.held(row)
            held = set(logical[entries[0] != NO_BLOCK].tolist())
            end = committed // block
            picture.box(lefts[group.name] + end * cell, y, (blocks - end) * cell, height, "#f7f8fa")
            for number in range(end):
                fill = colour[group.name] if number in held else "#dfe4e9"
                picture.box(lefts[group.name] + number * cell, y, cell, height, fill)
            right = lefts[group.name] + blocks * cell + 6
            picture.text(right, y + 9, f"{len(held)} held", size=10, colour=PALE)
        y += height + 2
    picture.legend(LEFT, y + 22, {"let go: no query can reach it": "#dfe4e9", "not computed yet": "#f7f8fa"})
    return picture


def tiers() -> Svg:
    """Where the tokens of five prompts come from: device, store, or computed."""
    manager = HybridMemoryManager(plan_geometry("kvtide", _small(128), 16), "16MiB", max_requests=4, max_model_len=2048)
    memory = np.zeros(manager.pool.num_pages * manager.geometry.page_bytes, np.uint8)
    store = make_store("HostConnector", {"max_bytes": "64MiB"})
    always = LoadPolicy(seconds_per_token=1.0)
    offload = OffloadManager(
        manager, Transfers(memory, store, staging_bytes=16 << 20), model="small", load_policy=always
    )
    prompt = np.arange(1000)
    other_end = np.concatenate([prompt[:600], np.arange(5000, 5400)])
    asked = (
        ("1  a prompt nobody has seen", prompt, "", False),
        ("2  the same again", prompt, "", False),
        ("3  the same, after the device's cache was emptied", prompt, "", True),
        ("4  one that parts from it at token 600", other_end, "", True),
        ("5  the first again, for another tenant (salt)", prompt, "b", False),
    )
    colour = {"device hit": COLOURS[0], "store hit": COLOURS[1], "computed": "#c3cad2"}
    picture = Svg(WIDTH, "Where the tokens of five prompts come from")
    picture.text(LEFT, 26, "1,000 tokens a prompt: full attention and windows of 128, blocks of 16", size=15)
    picture.legend(LEFT, 50, colour)
    y, scale = 84.0, (WIDTH - 2 * LEFT) / 1000
    for number, (label, tokens, salt, emptied) in enumerate(asked):
        if emptied:
            manager.reset_cache()
        before = dict(offload.stats().tokens)
        row = offload.admit(f"r{number}", tokens, salt=salt, turn_ends=[600]).row
        while not offload.ready(row):
            offload.poll()
        committed = int(manager.committed[row])
        loaded = offload.stats().tokens.get("store", 0) - before.get("store", 0)
        manager.reserve([row], [len(tokens) - committed])
        offload.commit([row], [len(tokens) - committed])
        offload.release(row)
        offload.transfers.drain(10)
        offload.poll()
        picture.text(LEFT, y, label)
        x = float(LEFT)
        parts = (("device hit", committed - loaded), ("store hit", loaded), ("computed", len(tokens) - committed))
        for name, count in parts:
            if count:
                picture.box(x, y + 7, count * scale, 24, colour[name], tip=f"{name}: {count} tokens")
                words = f"{count} {name}" if count > 90 else str(count)
                picture.text(x + count * scale / 2, y + 24, words, size=11, anchor="middle")
                x += count * scale
        y += 54
    offload.close()
    store.close()
    return picture


def waste() -> Svg:
    """The share of memory that is not needed, by the length of a request, under each policy."""
    lengths = np.unique(np.geomspace(256, 131072, 160).astype(np.int64))
    picture = Svg(WIDTH, "Waste by the length of a request")
    picture.text(LEFT, 26, f"waste of one request alone in its pages, by its length ({MODEL}, blocks of 16)", size=15)
    left, top, width, height, most = 70.0, 64.0, WIDTH - 110.0, 300.0, 0.9
    for share in np.arange(0, most + 0.01, 0.1):
        y = top + height * (1 - share / most)
        picture.line([(left, y), (left + width, y)], GRID, width=1)
        picture.text(left - 8, y + 4, f"{share:.0%}", size=11, colour=PALE, anchor="end")

    def at(length: float) -> float:
        return float(left + width * np.log(length / 256) / np.log(131072 / 256))

    for length in (256, 1024, 4096, 16384, 65536, 131072):
        picture.text(at(length), top + height + 18, f"{length:,}", size=11, colour=PALE, anchor="middle")
    picture.text(left + width / 2, top + height + 38, "tokens of the request", size=12, anchor="middle")
    colour = dict(zip(POLICIES, COLOURS, strict=False))
    for name in POLICIES:
        charges = plan_geometry(name, ModelLayout.preset(MODEL), 16).charge(lengths)
        needed = sum(charge.needed for charge in charges.values())
        allocated = sum(charge.allocated for charge in charges.values())
        share = 1 - needed / allocated
        points = [(at(length), top + height * (1 - part / most)) for length, part in zip(lengths, share, strict=True)]
        picture.line(points, colour[name])
    picture.legend(left, 50, colour)
    return picture


def _small(window: int) -> ModelLayout:
    """Two layers of each of two kinds."""
    full = FullAttention(num_kv_heads=1, head_dim=64, head_dim_v=64)
    near = SlidingWindow(num_kv_heads=1, head_dim=64, head_dim_v=64, window=window)
    specs = (full, near, full, near)
    return ModelLayout("small", tuple(Layer(at, spec) for at, spec in enumerate(specs)), max_model_len=2048)


def _run(manager: HybridMemoryManager, name: str, tokens: int, *, start: int, release: bool = False) -> None:
    row = manager.admit(name, np.arange(start, start + tokens)).row
    manager.reserve([row], [tokens])
    manager.commit([row], [tokens])
    if release:
        manager.release(row)
