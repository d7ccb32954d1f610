"""The `Runtime` of the `cuda` target: engines that run on an NVIDIA GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import Engine
from llmserve.engine.budgets import TokenBudgets
from llmserve.engine.cuda.bindings import NvidiaDevice
from llmserve.engine.cuda.device import Device
from llmserve.engine.cuda.layout import EngineHeader, read_header
from llmserve.engine.cuda.needs import NEEDS
from llmserve.engine.cuda.runner import CudaRunner, check_architecture, fixed_bytes
from llmserve.engine.cuda.tactics import choices, machine_of
from llmserve.engine.cuda.tuning import time_tactics
from llmserve.engine.directory.artifact import CACHE_FILE, EngineDirectory
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.selftest import SelfTest, SelfTestResult, run_stored_selftest
from llmserve.engine.kv_pool import pool_with_states
from llmserve.engine.machine.cores import num_threads
from llmserve.engine.machine.nvidia import visible_gpus
from llmserve.engine.runtime import Needs, Runtime, Tactics, nothing_to_tune
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.engine.tactics import TacticCache
from llmserve.errors import InvalidArgument, LlmserveError
from llmserve.progress import Progress

logger = logging.getLogger(__name__)
HONOURED = ("gpu_device_ids", "instance_gpus")  # of the former the first
AS_IT_IS = {"enable_chunked_context": True, "max_beam_width": 1, "cuda_graph_mode": True}  # what it does anyway


class CudaRuntime:
    """`open_device`: opens a GPU by its number for this process."""

    def __init__(self, open_device: Callable[[int], Device] = NvidiaDevice) -> None:
        self._open_device = open_device

    def needs(self) -> Needs:
        return NEEDS

    def problems_here(self, directory: EngineDirectory) -> list[str]:
        """Checks the GPU, its kernels, and memory for weights and one sequence."""
        try:
            header = read_header(directory.engine_file)
            with closing(self._open_device(0)) as device:
                check_architecture(header, device)
                _pool_sizes(directory, header, device, EngineSettings())
        except LlmserveError as error:
            return [str(error)]
        return []

    def open(self, directory: EngineDirectory, settings: EngineSettings) -> Engine:
        """Copy the weights to the device, allocate the KV pool, capture the graphs and start the step loop."""
        for text in settings.gpu.without_effect(HONOURED, AS_IT_IS):
            logger.warning("%s", text)
        from llmserve.engine.replicas import ReplicatedEngine  # asyncio, which inspect and doctor do not need

        gpus = _gpus(settings.gpu)
        if len(gpus) == 1:
            return self._open_on(gpus[0], directory, settings, TokenBudgets())
        shared = replace(settings, threads=max(1, num_threads(settings.threads) // len(gpus)))
        budgets = TokenBudgets()
        engines: dict[str, Engine] = {}
        try:
            for gpu in gpus:
                engines[f"GPU {gpu}"] = self._open_on(gpu, directory, shared, budgets)
        except BaseException as error:
            for engine in engines.values():
                engine.close()
            if isinstance(error, LlmserveError):
                raise error.at(f"GPU {gpus[len(engines)]}") from error
            raise
        return ReplicatedEngine(engines, budgets)

    def _open_on(self, gpu: int, directory: EngineDirectory, settings: EngineSettings, budgets: TokenBudgets) -> Engine:
        from llmserve.engine.inflight import InflightEngine

        header = read_header(directory.engine_file)
        device = self._open_device(gpu)
        try:
            check_architecture(header, device)
            num_blocks, num_states = _pool_sizes(directory, header, device, settings)
        except BaseException:
            device.close()
            raise
        runner = CudaRunner(
            directory.engine_file, device, num_blocks=num_blocks, threads=settings.threads, num_states=num_states,
            keeps_all=False,
        )  # fmt: skip
        info = replace(directory.info(), kernels=device.architecture)
        return InflightEngine(runner, info, settings.scheduler, budgets)

    def kernels(self) -> str:
        capability = visible_gpus()[0].compute_capability
        return f"sm_{capability.replace('.', '')}"

    def selftest(self, directory: EngineDirectory, adapter: SealedAdapter | None = None) -> SelfTestResult | None:
        return run_stored_selftest(
            directory, lambda num_blocks: CudaRunner(directory.engine_file, self._open_device(0), num_blocks=num_blocks)
        )

    def adapter_selftest(self, directory: EngineDirectory, adapter: SealedAdapter) -> SelfTest | None:
        return None

    def tactics(self, directory: EngineDirectory) -> Tactics:
        """The tactics for GPU 0."""
        header = read_header(directory.engine_file)
        if not header.tactics:
            return Tactics("the engine was built with only one tactic for each product")
        try:
            with closing(self._open_device(0)) as device:
                machine = machine_of(device)
        except LlmserveError as error:
            return Tactics(f"tactics can only be chosen on a machine with a GPU: {error}")
        cache = TacticCache.load(directory.path / CACHE_FILE, machine)
        return Tactics(f"tactics on {machine.device}, {machine.kernels}", choices(header, cache))

    def tune(self, directory: EngineDirectory, progress: Progress) -> None:
        """On GPU 0, which must have memory for the engine."""
        header = read_header(directory.engine_file)
        if not header.tactics:
            raise nothing_to_tune(self.tactics(directory))
        runner = CudaRunner(directory.engine_file, self._open_device(0), num_blocks=1, threads=1, num_states=1)
        try:
            timed = time_tactics(runner, progress)
        finally:
            runner.close()
        timed.save(directory.path / CACHE_FILE)

    def built_for(self, manifest: Manifest) -> str:
        return ", ".join(manifest.device["architectures"])

    def triton_backends(self, manifest: Manifest) -> Collection[str]:
        return ()


RUNTIME: Runtime = CudaRuntime()


def _gpus(settings: GpuSettings) -> Sequence[int]:
    """The GPUs that each run a copy of the engine."""
    chosen, instances = settings.gpu_device_ids, settings.instance_gpus
    if chosen and instances and set(chosen) != set(instances):
        raise InvalidArgument(
            f"gpu_device_ids ({', '.join(map(str, chosen))}) and instance_group's gpus "
            f"({', '.join(map(str, instances))}) are different GPUs; leave one of them out"
        )
    return instances or chosen[:1] or (0,)


def _pool_sizes(
    directory: EngineDirectory, header: EngineHeader, device: Device, settings: EngineSettings
) -> tuple[int, int]:
    """Blocks of the KV pool, and slots for states. Reserved host memory does not affect the device."""
    layout = header.cache_layout()
    return pool_with_states(
        directory.info(), replace(settings, reserved_bytes=0), block_size=header.block_size,
        block_bytes=layout.block_bytes, state_bytes=header.state_bytes,
        free_bytes=device.free_bytes() - fixed_bytes(header, layout), layers=layout.windowed_layers,
    )  # fmt: skip
