"""A build's options, resolved and frozen. Names follow trtllm-build where it has the option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from llmserve.builder.flag import Elsewhere, Flag, declared, flag_of, option, value_problems
from llmserve.builder.spellings import advice
from llmserve.builder.targets.options import TargetOptions
from llmserve.builder.targets.registry import TARGETS
from llmserve.engine.registry import DEFAULT_TARGET
from llmserve.errors import RecipeError
from llmserve.models.number_formats import AUTO, CACHES, FLOATS, QUANTIZED, ROUNDED, NumberFormat, WeightFormat

KV_CACHE_DTYPES = (AUTO, *CACHES)
Own = TypeVar("Own", bound=TargetOptions)


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """A flag of `llmserve build` and a key of recipes."""

    default: Any
    flag: Flag
    targets: tuple[str, ...] = ()  # targets that have it; empty: all

    @property
    def type(self) -> type:
        return type(self.default)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Every target has the options up to `target`; `given` has the options of single targets, by name."""

    dtype: str = option("float16", Flag("Weights and KV cache", tuple(FLOATS)))
    quantization: str = option(
        "",
        Flag(
            "Weights; activations become int8 with each. gguf: the blocks of a GGUF file as they are",
            tuple(QUANTIZED),
            default_text="none; for a GGUF file without --dtype gguf, on the cpu target",
        ),
    )
    calibration_data: str = option(
        "",
        Flag(
            "JSON lines with text, messages or prompt_ids that the network reads before its weights are rounded",
            default_text="none",
            leaves_a_trace=False,  # only the path; the manifest records the effect of the text
            is_path=True,
        ),
    )
    lora: str = option(
        "",
        Flag(
            "Folder of a LoRA adapter (PEFT) that is merged into the weights",
            default_text="none",
            leaves_a_trace=False,  # the manifest records the merged weights and the source's digest
            is_path=True,
        ),
    )
    drafting_layer: bool = option(
        False,
        Flag(
            "The checkpoint's layer for drafts (mtp.*) instead of its network: an engine for serve --draft-engine",
            leaves_a_trace=False,  # the manifest records the network
        ),
    )
    kv_cache_dtype: str = option(  # int8: with scales per token and head
        AUTO, Flag("KV cache (auto: like dtype; int8 on the cpu target if weights are quantized)", KV_CACHE_DTYPES)
    )
    max_batch_size: int = option(64, Flag("Sequences in one step", least=1))
    max_num_tokens: int = option(2048, Flag("Tokens in one step", least=1))
    max_seq_len: int = option(  # 0: the checkpoint's own limit
        0, Flag("Prompt and output of one sequence", default_text="the checkpoint's limit")
    )
    tokens_per_block: int = option(32, Flag("KV block size"))
    target: str = option(DEFAULT_TARGET, Flag("Device to compile for", tuple(TARGETS)))
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> BuildOptions:
        """Make options from flat names and values, as in flags and recipes.

        Raises `RecipeError` if a target's option contradicts the common option that it is an alias of.
        """
        common = declared(cls)
        given = {name: value for name, value in values.items() if name not in common}
        options = cls(**{name: value for name, value in values.items() if name in common}, given=given)
        for target, room in TARGETS.items():
            for name, value in options.of(room.options).in_other_words().items():
                if getattr(options, name) not in (common[name].default, value):
                    raise RecipeError(
                        f"{name} is {getattr(options, name)}, but the options of {target} say {value}: they differ; "
                        "give one of them"
                    )
                options = replace(options, **{name: value})
        return options

    def of(self, options: type[Own]) -> Own:
        """One target's own options: the given values, and defaults for the rest."""
        return options(**{name: self.given[name] for name in declared(options) if name in self.given})

    @property
    def own(self) -> TargetOptions:
        """The own options of this build's target; the defaults if the target is unknown."""
        return self.of(TARGETS[self.target].options) if self.target in TARGETS else TargetOptions()

    def as_dict(self) -> dict[str, Any]:
        """The options that determine the engine, without those of other targets or of the build process."""
        own = self.own.as_dict()
        kept = [name for name, declaration in declared(type(self)).items() if flag_of(declaration).leaves_a_trace]
        return {name: getattr(self, name) for name in kept} | ({self.target: own} if own else {})

    @property
    def floats(self) -> WeightFormat:
        """The float format of weights that are not quantized."""
        return FLOATS[self.dtype]

    @property
    def adapter(self) -> Path | None:
        """The folder of the LoRA adapter that is merged into the checkpoint."""
        return Path(self.lora) if self.lora else None

    @property
    def weights(self) -> WeightFormat:
        return QUANTIZED[self.quantization] if self.quantization else self.floats

    def cache(self, auto: NumberFormat | None = None) -> NumberFormat:
        """The format of keys and values; `auto` means the target's default, usually `floats`."""
        return (auto or self.floats) if self.kv_cache_dtype == AUTO else CACHES[self.kv_cache_dtype]

    def in_whole_blocks(self, num_tokens: int) -> int:
        """Round a number of tokens up to whole KV blocks."""
        return -(-num_tokens // self.tokens_per_block) * self.tokens_per_block

    def problems(self) -> list[str]:
        """Describe everything that is wrong with these values; empty if they are valid."""
        found = value_problems(self, advice)
        block = self.tokens_per_block
        rules = [
            (
                self.max_seq_len == 0 or self.max_seq_len >= 2,
                f"max_seq_len must be at least 2 (or 0: the checkpoint's limit), got {self.max_seq_len}",
            ),
            (block >= 1 and block & (block - 1) == 0, f"tokens_per_block must be a power of two, got {block}"),
            (
                self.kv_cache_dtype not in FLOATS or self.kv_cache_dtype == self.dtype,
                f"kv_cache_dtype is {self.kv_cache_dtype}, but an unquantized KV cache must have the engine's dtype: "
                f"write --kv-cache-dtype {self.dtype}, or change --dtype",
            ),
            (
                not self.calibration_data or bool(self.quantization),
                "calibration_data has no effect without quantization; leave it out, or set quantization to "
                f"{' or '.join(ROUNDED)}",
            ),
            (
                not self.calibration_data or not self.drafting_layer,
                "calibration_data has no effect on a drafting_layer, which does not read text; leave one out",
            ),
        ]
        found += [text for holds, text in rules if not holds]
        return found + self.own.problems() + self._misplaced()

    def notes(self) -> list[str]:
        """Notes about options that have no effect."""
        names = [
            f"{name} {value}"
            for name, value, known in self._foreign()
            if known.flag.elsewhere is Elsewhere.WITHOUT_EFFECT
        ]
        return [f"without effect on the {self.target} target: {', '.join(names)}"] if names else []

    def _misplaced(self) -> list[str]:
        """Problems with options that belong to another target, or to none."""
        found = [f"no target has an option {name}" for name in self.given if name not in declared_options()]
        others = replace(self, given={name: value for name, value, _ in self._foreign()})
        for room in TARGETS.values():
            found += others.of(room.options).problems()
        return list(dict.fromkeys(found)) + [
            f"{name} {value} is for the {' or '.join(known.targets)} target; leave it out, or build with "
            f"--target {known.targets[0]}"
            for name, value, known in self._foreign()
            if known.flag.elsewhere is Elsewhere.REFUSED
        ]

    def _foreign(self) -> Iterator[tuple[str, Any, DeclaredOption]]:
        """(name, value, option) of options that only other targets have and that are not the default."""
        for name, value in self.given.items():
            known = declared_options().get(name)
            if known is not None and self.target not in known.targets and value != known.default:
                yield name, value, known


def declared_options() -> Mapping[str, DeclaredOption]:
    """All options by name: the common ones, then those of each target."""
    found = {name: DeclaredOption(each.default, flag_of(each)) for name, each in declared(BuildOptions).items()}
    for target, room in TARGETS.items():
        for name, each in declared(room.options).items():
            targets = (*found[name].targets, target) if name in found else (target,)
            found[name] = DeclaredOption(each.default, flag_of(each), targets)
    return found
