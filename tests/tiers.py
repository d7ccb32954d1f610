"""Which tier each test file belongs to. `make test` runs FIRST, `make test-all` every tier.

A tier says what its tests need beside Python: nothing (`unit`), the compiled engine (`engine`), processes of llmserve
(`process`), or more time or an environment of their own (the others).
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST = ("unit", "engine", "process")
REST = ("docs", "gate", "extended", "interpreted", "sanitized", "cluster", "page")
TIERS = (*FIRST, *REST)

# Paths below tests/. Of those that a file's path begins with, the longest decides.
PLACES = {
    "unit": (
        "backends/ benchmark/ checkpoint/ cluster/ compat/ contracts/ evaluation/ frontends/ models/ "
        "pipelines/ scheduler/ serving/ stages/ tools/ wire/ test_budgets.py test_client.py "
        "test_images.py test_laws.py test_owned_directory.py test_project.py "
        "test_prose.py test_sampling_borders.py test_sealed_log.py test_strict_yaml.py"
    ),
    "engine": "builder/ engine/ parity/",
    "process": "cli/ clients/ e2e/ hostile/",
    "extended": (
        "builder/targets/tensorrt_llm/ cli/test_third_target.py e2e/test_adapters.py e2e/test_embeddings.py "
        "e2e/test_engine_socket.py e2e/test_published_repository.py e2e/test_rollout.py e2e/test_tensorrt_llm.py "
        "e2e/test_verify.py engine/tensorrt_llm/ frontends/text/test_schema.py fuzz/ stages/test_template_limits.py "
        "test_dependencies.py"
    ),
    "docs": "test_docs.py tools/test_site.py",
    "gate": (
        "cli/test_eval.py e2e/test_commands.py e2e/test_demo.py e2e/test_eval.py e2e/test_eval_harness.py "
        "e2e/test_require_gate.py evaluation/served/ evaluation/test_gate_rates.py "
        "evaluation/test_planted_defects.py evaluation/test_power.py frontends/text/test_lm_eval.py "
        "tools/test_check_gpu.py tools/test_server_benchmark.py"
    ),
    "interpreted": (
        "contracts/test_interpreted_engine.py contracts/test_interpreted_runner.py engine/cuda/ cli/test_cuda.py "
        "e2e/test_cuda.py tools/test_check_cuda.py tools/test_cuda_speed.py tools/test_cuda_times.py "
        "tools/test_gpu_kit.py"
    ),
    "sanitized": "engine/cpu/test_sanitizers.py",
    "cluster": (
        "e2e/test_balancers.py e2e/test_chaos.py e2e/test_cluster.py e2e/test_cluster_server.py "
        "e2e/test_dashboards.py e2e/test_fleet.py e2e/test_rolling_update.py e2e/test_soak.py "
        "tools/test_bench_cluster.py deploy/ wheels/"
    ),
    "page": "page/",
}
_TIER_OF_PLACE = {place: tier for tier, places in PLACES.items() for place in places.split()}


def tier_of(path: str) -> str:
    """Of a test file, by its path below tests/. Raises `LookupError` where no place is listed."""
    fitting = [place for place in _TIER_OF_PLACE if path == place or (place.endswith("/") and path.startswith(place))]
    if not fitting:
        raise LookupError(f"tests/{path} is in no tier; list it in tests/tiers.py")
    return _TIER_OF_PLACE[max(fitting, key=len)]


def chosen_tiers(names: str) -> Sequence[str]:
    """Of a comma-separated list; `first` and `rest` stand for several. Empty: all."""
    groups = {"first": FIRST, "rest": REST}
    chosen = [tier for name in names.split(",") if name for tier in groups.get(name, (name,))]
    if unknown := sorted(set(chosen) - set(TIERS)):
        raise LookupError(f"unknown tiers: {', '.join(unknown)}; there are {', '.join(TIERS)}, first and rest")
    return [tier for tier in TIERS if tier in chosen] if chosen else TIERS
