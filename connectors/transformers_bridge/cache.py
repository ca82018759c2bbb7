"""`KvtideCache`: `generate` on kvtide's memory. A small scheduler stands between it and the model.

    generate ──► model.forward(new columns, cache) ──► KvtideCache: sequences of tokens, one per row of the batch
                                                          │  admit (prefix hits), reserve, run, commit, preempt
                                                          └► PagedModel: the model's own forward, packed

`generate` steps all rows of a batch at once and sees only logits. Which tokens are computed for that is decided here:
what a prefix hit covers is not, rows that do not fit take turns, long prompts go in chunks, padding never reaches the
model. The memory is a pool and not a conversation: `generate` always passes whole prompts, and what is cached of them
is found by content. One batch at a time; a new one ends the one before, whose blocks stay cached.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvtide.connectors.config import TransferConfig, load_config, open_store
from kvtide.hma import HybridMemoryManager, Reservation
from kvtide.kvcache import ConfigError, Exhausted, KvtideError
from kvtide.kvcache.arena import Arena
from kvtide.kvcache.solver import solve_geometry
from kvtide.offload.manager import OffloadManager
from kvtide.offload.policies import LoadPolicy, StorePolicy
from kvtide.offload.store import Store
from kvtide.offload.transfers import Transfers

from .model import PagedModel, cache_argument, model_layout, weights_digest

_POLL_S = 0.0005
_NOT_SERVED = ("inputs_embeds", "labels", "output_attentions", "output_hidden_states", "pixel_values")


class CacheStats(NamedTuple):
    """Tokens since the start: of prompts, how many of them a device hit or a store hit covered, and how many tokens the
    model computed, those that preempted rows computed again included; and how often a row was preempted.
    """

    prompt_tokens: int
    device_hit_tokens: int
    store_hit_tokens: int
    computed_tokens: int
    preemptions: int


@dataclass(eq=False)
class _Sequence:
    """A row of the batch: its tokens (padding left out), and its row in the manager once it is admitted.

    `computed` tokens have been computed, although a preempted row may have to compute them again. `wanted` are the
    positions whose logits the forward call in progress wants, and the column of its result for each. `boundary`: where
    a recurrent model's state is kept, for later prompts.
    """

    tokens: list[int] = field(default_factory=list)
    row: int | None = None
    computed: int = 0
    wanted: dict[int, int] = field(default_factory=dict)
    boundary: int = 0


class KvtideCache(Cache):
    """KV memory for `model.generate(..., cache=this)`, and for plain forward calls.

    `memory` is in bytes, or text such as "4GiB". `store` is a kvtide store configuration (a mapping, JSON text or a
    path): prefixes go on in it, across processes. `model_id` names the weights there; by default they are sampled.
    `max_requests` bounds the batch, beams included, `max_model_len` a sequence's tokens, `max_step_tokens` what one
    pass through the model computes. `ConfigError` for what does not fit.

    The model's forward is wrapped and its attention implementation set to kvtide's, until `close`.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | str,
        block_size: int = 16,
        max_requests: int = 64,
        max_model_len: int | None = None,
        max_step_tokens: int = 2048,
        store: TransferConfig | Mapping[str, Any] | str | None = None,
        model_id: str | None = None,
        load_policy: LoadPolicy | None = None,
        store_policy: StorePolicy | None = None,
        staging_bytes: int = 64 << 20,
    ) -> None:
        super().__init__(layers=[])
        if "forward" in model.__dict__:
            raise ConfigError("the model has a KvtideCache already, or another wrapper of its forward; close it first")
        self.model = model
        geometry = solve_geometry(model_layout(model), block_size)
        self.manager = HybridMemoryManager(
            geometry,
            memory,
            max_requests=max_requests,
            max_model_len=max_model_len,
            max_step_tokens=max_step_tokens,
        )
        self.arena = Arena(geometry, self.manager.pool.num_pages, device=str(model.device))
        config = store if store is None or isinstance(store, TransferConfig) else load_config(store)
        self._paged = PagedModel(model, self.manager, self.arena, forward=model.forward)
        self._store: Store | None = None
        self.offload_manager: OffloadManager | None = None
        if config is not None:
            try:
                self._store = open_store(config)
            except BaseException:
                self._paged.close()
                raise
            self.offload_manager = OffloadManager(
                self.manager,
                Transfers(self.arena.memory, self._store, staging_bytes=staging_bytes),
                model=weights_digest(model) if model_id is None else model_id,
                stores=config.stores,
                loads=config.loads,
                load_policy=load_policy,
                store_policy=store_policy,
            )
        self._requests: HybridMemoryManager | OffloadManager = self.offload_manager or self.manager
        self._sequences: list[_Sequence] = []
        self._columns = 0
        # The last step and its sequences; committed at the next call, when it is known how much of it stands.
        self._open: tuple[Reservation, list[_Sequence]] | None = None
        self._serial = 0
        self._closed = False
        self._prompt_tokens = self._device_hits = self._store_hits = self._computed = self._preemptions = 0
        _wrap_forward(model)

    # -- what generate calls ------------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: whole prompts are to be passed, whatever is cached of them."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The longest sequence."""
        return self.manager.max_model_len

    @property
    def is_compileable(self) -> bool:
        """False: the tables change from step to step."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back, as assisted generation does. Not from a recurrent state."""
        return not self._paged.has_states

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns of the batch."""
        if tokens_to_remove > 0:
            raise ConfigError(f"crop takes the tokens to remove as a negative number, not {tokens_to_remove}")
        if not tokens_to_remove or not self._sequences:
            return
        if self._paged.has_states:
            raise ConfigError(
                "a recurrent state cannot take tokens back; assisted generation needs a model without one"
            )
        for sequence in self._sequences:
            del sequence.tokens[tokens_to_remove:]
            sequence.computed = min(sequence.computed, len(sequence.tokens))
        self._columns += tokens_to_remove
        self._settle()
        for sequence in self._sequences:
            if self._done(sequence) > len(sequence.tokens):
                self._leave(sequence)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row i go on from the sequence of row `beam_idx[i]`; blocks that are whole are shared, not copied."""
        self._settle()
        parents = [self._sequences[parent] for parent in beam_idx.tolist()]
        kept: set[_Sequence] = set()
        reordered = []
        for parent in parents:
            if parent in kept:
                reordered.append(_Sequence(list(parent.tokens), computed=parent.computed, boundary=parent.boundary))
            else:
                reordered.append(parent)
                kept.add(parent)
        for sequence in self._sequences:
            if sequence not in kept:
                self._leave(sequence)
        self._sequences = reordered

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        rows = torch.arange(len(self._sequences)).repeat_interleave(repeats)
        self.reorder_cache(rows)  # type: ignore[arg-type]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some rows of the batch."""
        self.reorder_cache(torch.arange(len(self._sequences))[indices])  # type: ignore[arg-type]

    def reset(self) -> None:
        """End the batch: what its rows hold becomes a cached prefix."""
        self._settle()
        for sequence in self._sequences:
            self._leave(sequence)
        self._sequences, self._columns = [], 0

    # -- what its user calls ------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """What was computed, hit and preempted since the start."""
        return CacheStats(self._prompt_tokens, self._device_hits, self._store_hits, self._computed, self._preemptions)

    def close(self, timeout: float = 30.0) -> bool:
        """End the batch, finish what is being stored, and give the model its own attention and forward back.

        False if the store did not finish in `timeout` seconds. A second close does nothing.
        """
        if self._closed:
            return True
        self._closed = True
        self.reset()
        done = True
        if self.offload_manager is not None and self._store is not None:
            expires = time.monotonic() + timeout
            while self.offload_manager.stats().held_bytes and time.monotonic() < expires:
                self.offload_manager.poll()
                time.sleep(_POLL_S)
            done = self.offload_manager.close(max(expires - time.monotonic(), 0.1))
            self._store.close()
        del self.model.forward
        self._paged.close()
        return done

    # -- the batch ----------------------------------------------------------------------------------------------------

    def forward(self, **inputs: Any) -> CausalLMOutputWithPast:
        """The wrapped model's forward: `logits` of the wanted columns `[rows, columns, vocabulary]`, and the cache."""
        for name in _NOT_SERVED:
            if inputs.get(name) is not None and inputs[name] is not False:
                raise ConfigError(f"{name} is given; kvtide's cache serves token ids to logits, and nothing else")
        ids, keep = inputs.get("input_ids"), inputs.get("logits_to_keep", 0)
        if ids is None or ids.ndim != 2:
            raise ConfigError("input_ids are missing, or are not [rows, columns]")
        if not isinstance(keep, int):
            raise ConfigError("logits_to_keep is a tensor; kvtide's cache takes a number of columns, 0 for all")
        self._take(ids, inputs.get("attention_mask"), inputs.get("position_ids"), keep)
        try:
            logits = self._compute(len(ids), min(keep, ids.shape[1]) or ids.shape[1])
        except BaseException:
            self._abandon()
            raise
        output = CausalLMOutputWithPast(logits=logits)
        output[cache_argument(self.model)] = self
        return output

    def _take(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, keep: int) -> None:
        """Learn the call's columns: a new batch, or the next columns of the present one."""
        rows, count = ids.shape
        if mask is not None and mask.ndim != 2:
            raise ConfigError(f"attention_mask has {mask.ndim} dimensions; kvtide's cache takes [rows, columns]")
        if mask is not None:
            past = mask.shape[1] - count
        elif positions is not None:
            past = int(positions.flatten()[0])
        else:
            past = self._columns if rows == len(self._sequences) else 0
        if past == 0:
            self.reset()
            self._sequences = [_Sequence() for _ in range(rows)]
        elif past != self._columns or rows != len(self._sequences):
            raise KvtideError(
                f"the call goes on behind column {past} of {rows} rows, and the cache's batch has {self._columns} of "
                f"{len(self._sequences)}; one KvtideCache serves one batch at a time"
            )
        else:
            self._settle()
        real = np.ones((rows, count), dtype=np.bool_) if mask is None else mask[:, past:].bool().cpu().numpy()
        columns = [np.flatnonzero(is_real).tolist() for is_real in real]
        for row, (sequence, mine) in enumerate(zip(self._sequences, columns, strict=True)):
            if positions is None or not mine:
                continue
            last = positions[0 if len(positions) == 1 else row].flatten()[mine[-1]]
            if int(last) != len(sequence.tokens) + len(mine) - 1:
                raise ConfigError(
                    "position_ids do not count each row's tokens from 0; kvtide's cache has no other positions"
                )
        self._columns = past + count
        first = count - keep if 0 < keep <= count else 0
        for sequence, tokens, mine in zip(self._sequences, ids.tolist(), columns, strict=True):
            start = len(sequence.tokens)
            sequence.tokens += [tokens[column] for column in mine]
            sequence.wanted = {start + at: column - first for at, column in enumerate(mine) if column >= first}
            if past == 0:
                self._prompt_tokens += len(sequence.tokens)
                sequence.boundary = (len(sequence.tokens) - 1) // self.manager.base * self.manager.base

    def _compute(self, rows: int, columns: int) -> torch.Tensor:
        """Compute every token that is not; logits `[rows, columns, vocabulary]`, 0 where a column is padding."""
        logits: torch.Tensor | None = None
        while batch := self._reserve():
            self._open = plan, sequences = batch
            ids: list[int] = []
            at: list[int] = []
            targets: list[tuple[int, int]] = []
            for sequence, start, count in zip(sequences, plan.start.tolist(), plan.num_tokens.tolist(), strict=True):
                for position in sorted(p for p in sequence.wanted if start <= p < start + count):
                    at.append(len(ids) + position - start)
                    targets.append((self._sequences.index(sequence), sequence.wanted.pop(position)))
                ids += sequence.tokens[start : start + count]
                sequence.computed = max(sequence.computed, start + count)
            # The pass needs some logits to give their shape.
            found = self._paged.run(plan, ids, at or [len(ids) - 1])
            if logits is None:
                logits = found.new_zeros((rows, columns, found.shape[1]))
            if targets:
                to_rows, to_columns = torch.tensor(targets, device=found.device).T
                logits[to_rows, to_columns] = found
            self._computed += len(ids)
            if self._paged.has_states:
                self._settle()
                self._checkpoint(sequences)
        if logits is None:
            raise ConfigError("the call has no token to compute: attention_mask is 0 everywhere")
        return logits

    def _reserve(self) -> tuple[Reservation, list[_Sequence]] | None:
        """The next pass: as many rows with tokens to compute as fit; None when there are none."""
        self._settle()
        batch, counts, budget = [], [], self.manager.max_step_tokens
        heads: set[tuple[int, ...]] = set()
        for sequence in self._sequences:
            if sequence.computed == len(sequence.tokens) or not budget:
                continue
            head = tuple(sequence.tokens[: self.manager.base])
            if not self._runs(sequence):
                if head in heads:  # wait for the row that computes the same prefix
                    continue
                self._start(sequence)
            done = self._done(sequence)
            left = len(sequence.tokens) - done
            if left >= self.manager.base:
                heads.add(head)
            if self._paged.has_states and done < sequence.boundary:
                left = min(left, sequence.boundary - done)
            batch.append(sequence)
            counts.append(min(left, budget))
            budget -= counts[-1]
        while batch:
            try:
                return self.manager.reserve([s.row for s in batch], counts), batch  # type: ignore[arg-type]
            except Exhausted as error:
                others = [s for s in self._sequences if s not in batch and self._runs(s)]
                if others:
                    self._requests.preempt(others[-1].row)  # type: ignore[arg-type]
                    self._preemptions += 1
                elif len(batch) > 1:
                    batch.pop()
                    counts.pop()
                elif counts[0] > self.manager.base:
                    counts[0] = counts[0] // 2
                else:
                    raise Exhausted(
                        f"the memory does not hold one sequence of {len(batch[0].tokens)} tokens: {error}"
                    ) from None
        return None

    def _start(self, sequence: _Sequence) -> None:
        """Admit a row, or resume it; returns when what a store has of it is loaded."""
        if sequence.row is None:
            self._serial += 1
            # A hit ends before the first token whose logits are wanted.
            known = min(sequence.wanted, default=len(sequence.tokens) - 1) + 1
            admission = self._requests.admit(f"sequence {self._serial}", sequence.tokens[:known])
            sequence.row = admission.row
        else:
            admission = self._requests.resume(sequence.row)
        if self.offload_manager is not None:
            while not self.offload_manager.ready(sequence.row):
                self.offload_manager.poll()
                time.sleep(_POLL_S)
        self._device_hits += admission.num_cached_tokens
        self._store_hits += max(self._done(sequence) - admission.num_cached_tokens, 0)

    def _settle(self) -> None:
        """Commit the open step: all of it, or what `crop` has left of it."""
        if self._open is None:
            return
        plan, sequences = self._open
        self._open = None
        accepted, unseen = [], []
        for sequence, start, count in zip(sequences, plan.start.tolist(), plan.num_tokens.tolist(), strict=True):
            assert sequence.row is not None
            stands = min(max(len(sequence.tokens) - start, 0), count)
            accepted.append(stands)
            unseen += sequence.tokens[self.manager.num_tokens(sequence.row) : start + stands]
        self._requests.commit(plan.rows, accepted, unseen)
        if self.offload_manager is not None:
            self.offload_manager.poll()

    def _abandon(self) -> None:
        """A call has failed: end the batch. What its open step was to compute counts for nothing."""
        is_open, self._open = self._open is not None, None
        self.reset()
        if is_open:
            self.manager.commit([], [])  # its rows are gone; the blocks that it might still write are free now

    def _checkpoint(self, sequences: list[_Sequence]) -> None:
        for sequence in sequences:
            if sequence.boundary and self._done(sequence) == sequence.boundary:
                assert sequence.row is not None
                self._paged.copy(self._requests.checkpoint(sequence.row))

    def _leave(self, sequence: _Sequence) -> None:
        if sequence.row is not None:
            self._requests.release(sequence.row)
            sequence.row = None

    def _runs(self, sequence: _Sequence) -> bool:
        return sequence.row is not None and sequence.row in self.manager.running_rows

    def _done(self, sequence: _Sequence) -> int:
        """Tokens of a sequence that are computed and committed."""
        return 0 if sequence.row is None else int(self.manager.committed[sequence.row])


def _wrap_forward(model: Any) -> None:
    """Send a model's forward calls that carry a `KvtideCache` to it."""
    own, name = model.forward, cache_argument(model)

    @functools.wraps(own)
    def forward(*args: Any, **inputs: Any) -> Any:
        cache = inputs.get(name, inputs.get("past_key_values"))
        if not isinstance(cache, KvtideCache):
            return own(*args, **inputs)
        if args:
            inputs = {"input_ids": args[0], **inputs}
        return cache.forward(**inputs)

    model.forward = forward
