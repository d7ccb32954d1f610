"""The `Runtime` of the `cpu` target: engines that run on this machine's processor."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil
from pathlib import Path
from typing import NamedTuple

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import Engine, RunnerInfo
from llmserve.engine.cpu.layout import EngineHeader
from llmserve.engine.cpu.needs import NEEDS
from llmserve.engine.cpu.oversize import left_beside_weights, oversize_warning
from llmserve.engine.cpu.runner import CpuRunner, layout_of, read_header
from llmserve.engine.cpu.tactics import choose, linear_shapes, num_timed_bytes, this_machine, time_tactics
from llmserve.engine.directory.artifact import CACHE_FILE, EngineDirectory
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.selftest import SelfTest, SelfTestResult, make_adapter_selftest, run_stored_selftest
from llmserve.engine.draft_engine import DraftEngine, check_draft_engine
from llmserve.engine.kv_pool import PoolShape, blocks_beside, pool_with_states
from llmserve.engine.machine.memory import available_memory_bytes
from llmserve.engine.native.library import available_isas, chosen_isa, load_library
from llmserve.engine.runtime import Needs, Runtime, Tactics
from llmserve.engine.settings import EngineSettings
from llmserve.engine.tactics import TacticCache
from llmserve.errors import EngineFileError, InvalidArgument, LlmserveError, Unsupported
from llmserve.models.number_formats import FLOAT32
from llmserve.progress import Progress
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.drafts.model import CAUGHT_UP_AT_ONCE, NUM_STATES
from llmserve.scheduler.drafts.pending import MAX_PENDING
from llmserve.scheduler.settings import WindowedLayers

logger = logging.getLogger(__name__)
HONOURED = ("kv_cache_dir", "kv_cache_disk_size")
MOST_DRAFTED_FOR = 8  # most sequences in a draft engine whose network has states, each of which takes permanent memory
AS_IT_IS = {"enable_chunked_context": True, "max_beam_width": 1}  # what this engine does anyway


class CpuRuntime:
    def needs(self) -> Needs:
        return NEEDS

    def problems_here(self, directory: EngineDirectory) -> list[str]:
        """Checks the kernels, the engine file's version, and memory for the weights and one sequence."""
        found = []
        for ask in (load_library, lambda: pool_sizes(directory, EngineSettings())):
            try:
                ask()
            except LlmserveError as error:
                found.append(str(error))
        return found

    def open(self, directory: EngineDirectory, settings: EngineSettings) -> Engine:
        """Map the engine file, allocate the KV pool and start the step loop."""
        from llmserve.engine.inflight import InflightEngine  # asyncio, which inspect and doctor do not need
        from llmserve.engine.kv_files.block_files import block_files
        from llmserve.engine.kv_files.sealed_prefixes import load_prefixes

        if what := directory.only_drafts:
            raise Unsupported(
                f"{directory.path} is {what}; give it to --draft-engine, together with the engine that it drafts for"
            )
        draft = _draft_directory(directory, settings)
        num_blocks, num_states = pool_sizes(directory, settings, draft)
        file, header = directory.engine_file, read_header(directory.engine_file)
        honoured = HONOURED if draft is None else (*HONOURED, "draft_engine")
        for text in settings.gpu.without_effect(honoured, AS_IT_IS):
            logger.warning("%s", text)
        layout = layout_of(file, header)
        taken = num_blocks * layout.block_bytes + num_states * header.state_bytes + header.activation_bytes
        if taken + file.stat().st_size > (available := available_memory_bytes()):
            logger.warning("%s", oversize_warning(file, available, taken))
        runner = CpuRunner.open(
            file, num_blocks=num_blocks, threads=settings.threads, num_states=num_states, keeps_all=False,
            handed_out=draft.hidden_width if draft else 0,
        )  # fmt: skip
        info = replace(directory.info(), kernels=runner.isa)
        files = block_files(settings.gpu, info, runner.info)
        prefixes = load_prefixes(directory, runner.isa, runner.info) if settings.scheduler.reuses_blocks else None
        drafting = None
        if draft is not None:
            drafter = _draft_runner(draft, runner.info, settings)
            drafting = DraftEngine(drafter, runner.info, draft.draft_vocabulary)
        return InflightEngine(
            runner, info, settings.scheduler, files=files, adapter_limits=settings.adapter_limits,
            draft_engine=drafting, prefixes=prefixes,
        )  # fmt: skip

    def kernels(self) -> str:
        return chosen_isa()

    def selftest(self, directory: EngineDirectory, adapter: SealedAdapter | None = None) -> SelfTestResult | None:
        return run_stored_selftest(
            directory, lambda num_blocks: CpuRunner.open(directory.engine_file, num_blocks=num_blocks), adapter
        )

    def adapter_selftest(self, directory: EngineDirectory, adapter: SealedAdapter) -> SelfTest | None:
        plainest = available_isas()[0]
        return make_adapter_selftest(
            directory,
            lambda num_blocks: CpuRunner.open(directory.engine_file, num_blocks=num_blocks, isa=plainest),
            adapter,
        )

    def tactics(self, directory: EngineDirectory) -> Tactics:
        """The tactic for every distinct shape of a linear layer on this machine."""
        machine = this_machine()
        cache = TacticCache.load(directory.path / CACHE_FILE, machine)
        shapes = linear_shapes(directory.engine_file)
        return Tactics(
            f"tactics on {machine.device}, {machine.kernels}", {str(shape): choose(cache, shape) for shape in shapes}
        )

    def tune(self, directory: EngineDirectory, progress: Progress) -> None:
        """Measure tactics as a build does, for an engine that was built on another machine."""
        progress.phase("time tactics", num_timed_bytes(directory.engine_file))
        timed = time_tactics(directory.engine_file, TacticCache(this_machine()), partial(progress.advance, "tactics"))
        timed.save(directory.path / CACHE_FILE)

    def built_for(self, manifest: Manifest) -> str:
        return ""  # one file serves every processor

    def triton_backends(self, manifest: Manifest) -> Collection[str]:
        return ()


def _draft_directory(directory: EngineDirectory, settings: EngineSettings) -> EngineDirectory | None:
    """The directory of the draft engine. None: there is none, or it would have no effect."""
    path = settings.gpu.draft_engine
    if not (path and Speculation.DRAFT in settings.scheduler.speculation):
        return None
    draft = EngineDirectory.open(Path(path))
    if (target := draft.manifest.target) != directory.manifest.target:
        raise InvalidArgument(f"{path} cannot draft, because it is an engine of the target {target}")
    check_draft_engine(draft, directory)
    tokens, num_tokens = draft.draft_vocabulary, read_header(draft.engine_file).draft_vocab_size
    if num_tokens != (0 if tokens is None else len(tokens)):
        raise EngineFileError(f"{path}: its head and its draft vocabulary have different sizes; build it again")
    return draft


class _DraftPool(NamedTuple):
    block_bytes: int
    for_block: Fraction  # blocks for each block of the engine that it drafts for
    num_more: int  # for tokens that it catches up on in a step, in addition to their window


def _draft_pool(draft: EngineDirectory, theirs: PoolShape, max_seq_len: int) -> _DraftPool:
    """The pool of an engine that drafts for one with a pool of this shape: it has room for the same sequences."""
    header = read_header(draft.engine_file)
    layout = layout_of(draft.engine_file, header)
    layers = layout.windowed_layers
    for_block = blocks_beside(theirs, PoolShape(header.block_size, layers), max_seq_len)
    return _DraftPool(layout.block_bytes, for_block, layers.num_tables * -(-CAUGHT_UP_AT_ONCE // header.block_size))


def _draft_runner(draft: EngineDirectory, beside: RunnerInfo, settings: EngineSettings) -> CpuRunner:
    pool = _draft_pool(draft, PoolShape(beside.block_size, beside.windowed_layers), beside.max_seq_len)
    num_states = _num_draft_states(draft, beside.max_batch_size)
    return CpuRunner.open(
        draft.engine_file, num_blocks=ceil(beside.num_blocks * pool.for_block) + pool.num_more,
        threads=settings.threads, num_states=num_states, keeps_all=False, handed_out=draft.hidden_width,
    )  # fmt: skip


def _num_draft_states(draft: EngineDirectory, max_batch_size: int) -> int:
    return NUM_STATES * min(max_batch_size, draft.info().max_batch_size, MOST_DRAFTED_FOR)


def _draft_bytes(draft: EngineDirectory | None, header: EngineHeader, layers: WindowedLayers) -> tuple[int, int]:
    """Memory of a draft engine: permanent, and for each block of the engine with `header` that it drafts for."""
    if draft is None:
        return 0, 0
    own = read_header(draft.engine_file)
    fixed = draft.engine_file.stat().st_size + own.activation_bytes
    fixed += _num_draft_states(draft, header.max_batch_size) * own.state_bytes
    num_rows = 2 * header.max_num_tokens + header.max_batch_size * MAX_PENDING  # handed out and read; and in between
    fixed += num_rows * FLOAT32.num_bytes(own.hidden_width)
    pool = _draft_pool(draft, PoolShape(header.block_size, layers), header.max_seq_len)
    return fixed + pool.num_more * pool.block_bytes, ceil(pool.for_block * pool.block_bytes)


def pool_sizes(
    directory: EngineDirectory, settings: EngineSettings, draft: EngineDirectory | None = None
) -> tuple[int, int]:
    """Blocks of the KV pool, and slots for states: weights are mapped, and all memory is the machine's. The pool of a
    draft engine for the same number of tokens takes part of it."""
    header, file, info = read_header(directory.engine_file), directory.engine_file, directory.info()
    layout = layout_of(file, header)
    layers = layout.windowed_layers
    fixed, for_block = _draft_bytes(draft, header, layers)
    block_bytes = layout.block_bytes + for_block
    beside = header.activation_bytes + settings.reserved_bytes + fixed
    num_needed = -(-(settings.max_kv_tokens or info.max_seq_len) // header.block_size)
    of_one = layers.num_blocks_for(info.max_seq_len, header.block_size)
    num_needed += num_needed * layers.num_tables if settings.max_kv_tokens else of_one
    needed = num_needed * block_bytes + header.state_bytes
    least = int(needed / settings.kv_cache_fraction) + beside
    free_bytes = left_beside_weights(available_memory_bytes(), file.stat().st_size, least) - beside
    num_blocks, num_states = pool_with_states(
        info, settings, block_size=header.block_size, block_bytes=block_bytes, state_bytes=header.state_bytes,
        free_bytes=free_bytes, layers=layers,
    )  # fmt: skip
    # for texts that need one step: its tokens, and a partly filled block for each text
    of_step = -(-header.max_num_tokens // header.block_size) + header.max_batch_size
    return min(num_blocks, of_step) if header.needs_whole else num_blocks, num_states


RUNTIME: Runtime = CpuRuntime()
