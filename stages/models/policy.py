"""Policies as directories: found by name, digested, described, published. `loading.py` makes models of them.

A policy is a Hugging Face directory, or a PEFT adapter over the run's `policies/00000000`.
Its digest covers weights, config and tokenizer, for an adapter also the base's digest.
`policy.json` beside them says where it came from and holds the canary: tokens and the
log-probs that the trainer saw, by which `sync` proves that the weights arrived.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.digests import cached_digest, digest_bytes, digest_json
from nanoskyrl.stages.core.errors import InputError, NanoskyrlError, OutputError, did_you_mean
from nanoskyrl.stages.core.leftovers import remove_leftovers, scratch_beside
from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.runs import POLICY_JSON, Run, is_published
from nanoskyrl.stages.core.storage import (
    as_path,
    at_hand,
    is_local,
    link_or_copy,
    make_directory,
    sync_directory,
    write_whole,
)

STARTER = "starter"
STARTER_DIRECTORY = Path(__file__).parent / "starter_policy"
CRITIC = "critic"
"""Folder of PPO's critic, beside the policy's files and no part of them."""
PATTERNS = (
    "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json", "config.json",
    "generation_config.json", "adapter_config.json", "adapter_model.bin", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*", "*.py",
)  # fmt: skip
"""Files that make a policy, code that its config names among them; what else lies beside them is not part of it."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """The contents of `policy.json`. The version is not in it: it is the directory's name."""

    parent: str | None = None
    """Digest of the policy that training started from; None for a policy that came from outside."""
    base: str | None = None
    """Digest of the model that an adapter belongs to."""
    source: str | None = None
    """The name under which the first policy was asked for, such as a hub id."""
    canary_ids: list[int] = field(default_factory=list)
    """Tokens of one trained sequence."""
    canary_logprobs: list[float] = field(default_factory=list)
    """Nats of each canary token but the first, given those before, at temperature 1, as the trainer computed them."""
    critic: str | None = None
    """Digest of what lies in `critic/`; None: PPO did not train this policy."""
    merged: str | None = None
    """Digest of the adapter that was merged into its base to make this policy, for one that came from outside."""
    seal: str | None = None
    """Digest of all the rest, for one that came from outside: no manifest holds the digest of its policy.json."""

    def to_bytes(self) -> bytes:
        """Return the file's contents."""
        plain = {name: value for name, value in asdict(self).items() if value is not None or name != "seal"}
        return (json.dumps(plain, sort_keys=True) + "\n").encode()

    def sealed(self) -> "PolicyInfo":
        """Return the same with its seal."""
        return replace(self, seal=digest_bytes(replace(self, seal=None).to_bytes()))


def resolve_policy(name: str) -> Path:
    """Return the directory of a policy named `starter`, by a path, or by a hub id.

    Raises:
        InputError: nothing is there, or it is not a policy with a tokenizer.
    """
    if name == STARTER:
        path = STARTER_DIRECTORY
    elif as_path(name).is_dir():
        path = as_path(name)
    elif name.count("/") == 1 and not name.startswith((".", "/", "~")):
        path = _from_hub(name)
    else:
        raise InputError(
            f"there is no policy `{name}`",
            hint=did_you_mean(name, [STARTER]) or "Name `starter`, a directory, or a hub id such as Qwen/Qwen2.5-0.5B",
        )
    check_policy(path)
    return path


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(PATTERNS)))
    except Exception as error:  # the hub client raises its own, requests' and httpx's errors
        raise InputError(
            f"cannot get `{name}` from the hub: {type(error).__name__}: {first_line(error)}",
            hint="Check the name and the network, or name a local directory",
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or two where it only announces the next; libraries write pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def check_policy(path: Path) -> None:
    """Raise InputError unless the directory holds weights, a config and a tokenizer, or an adapter."""
    if not (path / "config.json").is_file() and not is_adapter(path):
        raise InputError(f"`{path}` holds no config.json", hint="Name a Hugging Face model directory")
    if not is_adapter(path) and not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"policy `{path}` has no tokenizer", hint="Save the tokenizer beside the weights")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise InputError(f"policy `{path}` has no weights", hint="Save the model there with save_pretrained")


def check_trained(run: Run, version: int) -> None:
    """Raise InputError if a published policy of a run is not the one that the step before it trained."""
    policy, made = run.policy(version), run.stage(version - 1, "train")
    if version and is_finished(made) and read_manifest(made).facts.get("policy") not in (None, policy_digest(policy)):
        raise another_policy(policy, version - 1)


def another_policy(policy: Path, step: int) -> InputError:
    """Return the error of a policy whose files are not those that a step trained."""
    return InputError(f"`{policy}` is not what step {step} trained", hint="Its files were changed: see `skyrl verify`")


def is_adapter(path: Path) -> bool:
    """Say whether a policy is a PEFT adapter."""
    return (path / "adapter_config.json").is_file()


def policy_files(path: Path) -> list[Path]:
    """Return the files that make the policy, sorted by name."""
    return sorted({file for pattern in PATTERNS for file in path.glob(pattern) if file.is_file()})


def policy_digest(path: Path) -> str:
    """Return the digest of a policy's weights, config and tokenizer."""
    files = {file.name: cached_digest(file) for file in policy_files(path)}
    if is_adapter(path):
        files["base"] = read_info(path).base or ""
    return digest_json(files)


def is_weights(file: Path) -> bool:
    """Say whether a policy's file holds weights, or says which file holds which."""
    return file.suffix in (".safetensors", ".bin") or file.name.endswith(".index.json")


def weights_digest(path: Path) -> str:
    """Return the digest of the weights alone: two policies with the same give the same answers."""
    return digest_json({file.name: cached_digest(file) for file in policy_files(path) if is_weights(file)})


def same_weights(a: Path, b: Path) -> bool:
    """Say whether two policies give the same answers; an adapter that adds nothing is its base."""
    return _weights_that_act(a) == _weights_that_act(b)


def _weights_that_act(path: Path) -> tuple[str, ...]:
    """Return the digests of a whole model and of what an adapter adds to it."""
    if not is_adapter(path):
        return (weights_digest(path),)
    from safetensors import safe_open

    base, file = weights_digest(find_base(path)), path / "adapter_model.safetensors"
    with safe_open(file, framework="pt") as opened:  # numpy has no bfloat16
        # What is added is B times A, besides which an adapter may hold whole layers.
        adds = any(
            "lora_A" not in name and opened.get_tensor(name).any()
            for name in opened.keys()  # noqa: SIM118 - no dictionary
        )
    return (base, weights_digest(path)) if adds else (base,)


def frame_digest(path: Path) -> str:
    """Return the digest of everything but the weights: config, tokenizer, chat template."""
    return digest_json({file.name: cached_digest(file) for file in policy_files(path) if not is_weights(file)})


def critic_digest(policy: Path) -> str | None:
    """Return the digest of the critic saved beside a policy; None if there is none."""
    folder = policy / CRITIC
    if not folder.is_dir():
        return None
    return digest_json({file.name: cached_digest(file) for file in sorted(folder.iterdir())})


def check_critic(policy: Path) -> None:
    """Refuse a critic that is not the one that was saved with its policy.

    Raises:
        InputError: it is gone, or was changed.
    """
    saved, found = read_info(policy).critic, critic_digest(policy)
    if saved != found:
        raise InputError(
            f"the critic of `{policy}` is {'gone' if found is None else 'not the one that was trained with it'}",
            hint="Publish the policy again from the step that trained it",
        )


def read_info(path: Path) -> PolicyInfo:
    """Return the contents of `policy.json`, or what stands for a policy from outside."""
    import msgspec

    try:
        return msgspec.convert(json.loads((path / POLICY_JSON).read_bytes()), PolicyInfo)
    except FileNotFoundError:
        return PolicyInfo()
    except (ValueError, RecursionError) as error:  # msgspec's error is a ValueError
        raise InputError(
            f"`{path / POLICY_JSON}` is not what `train` writes: {error}", hint="Run `skyrl train` again with `--force`"
        ) from error


def model_name(policy: Path) -> str:
    """Return what people call a policy's model: what its run began with, `starter`, a hub id, or its directory's name.

    Raises:
        InputError: `policy.json` cannot be read.
    """
    if policy == STARTER_DIRECTORY:
        return STARTER
    # The hub's client keeps a model in `models--OWNER--NAME/snapshots/REVISION`.
    kept = policy.parent.parent.name.removeprefix("models--").replace("--", "/")
    return read_info(policy).source or (kept if policy.parent.name == "snapshots" else policy.name)


def write_info(path: Path, info: PolicyInfo) -> None:
    """Write `policy.json`."""
    write_whole(path / POLICY_JSON, info.to_bytes())


def publish(source: Path, target: Path, *, name: str | None = None, merged: str | None = None) -> str:
    """Give a policy its place as `policies/N`, by hard links where possible, and return its digest.

    Args:
        source: The policy's directory.
        target: Its place.
        name: What the user called it, for a policy from outside the run.
        merged: Digest of the adapter that it was made from, if it was.

    Raises:
        OutputError: another policy already has this place.
    """
    digest = policy_digest(source)
    if is_published(target):
        if policy_digest(target) != digest:
            raise OutputError(
                f"`{target}` already holds another policy", hint="Start another run, or move the old one away"
            )
        return digest
    remove_leftovers(target.parent)
    info = read_info(source) if name is None else PolicyInfo(source=name, merged=merged).sealed()
    try:
        if not is_local(target):
            _put_together(source, target, info, ours=name is None)
            return digest
        with scratch_beside(target) as scratch:
            _put_together(source, scratch, info, ours=name is None)
            scratch.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        if is_published(target) and policy_digest(target) == digest:  # another process was there first
            return digest
        raise OutputError(
            f"cannot publish `{target}`: {error.strerror or error}", hint="Check free space and permissions"
        ) from error
    return digest


def _put_together(source: Path, target: Path, info: PolicyInfo, *, ours: bool) -> None:
    """Give a policy's files a second place, by links where there are some; its policy.json comes last."""
    for file in policy_files(source):
        # A directory from outside may change under us; what training wrote does not.
        (link_or_copy if ours or not is_local(target) else shutil.copyfile)(file, target / file.name)
    if ours and (source / CRITIC).is_dir():
        make_directory(target / CRITIC)
        for file in (source / CRITIC).iterdir():
            link_or_copy(file, target / CRITIC / file.name)
        sync_directory(target / CRITIC)
    write_info(target, info)
    sync_directory(target)


def policy_at_hand(policy: Path) -> Path:
    """Return a policy on this machine, for what loads models: itself, or a copy of what lies behind its URL.

    Raises:
        InputError: it is an adapter whose base is not at hand.
    """
    if not is_local(policy) and is_adapter(policy):
        at_hand(find_base(policy))
    return at_hand(policy)


def find_base(adapter: Path) -> Path:
    """Return the model that an adapter belongs to: the run's first policy, or what its config names.

    Raises:
        InputError: no candidate has the digest that the adapter asks for.
    """
    wanted = read_info(adapter).base
    with read_errors(adapter / "adapter_config.json"):
        named = str(json.loads((adapter / "adapter_config.json").read_bytes()).get("base_model_name_or_path") or "")
    candidates = [parent / "policies" / "00000000" for parent in adapter.resolve().parents]
    if named == STARTER or Path(named).is_dir() or named.count("/") == 1:
        candidates.append(
            STARTER_DIRECTORY if named == STARTER else Path(named) if Path(named).is_dir() else _from_hub(named)
        )
    for candidate in candidates:
        if candidate.is_dir() and (wanted is None or policy_digest(candidate) == wanted):
            return candidate
    raise InputError(
        f"the base model of adapter `{adapter}` is not at hand", hint="Keep the adapter inside its run directory"
    )


@contextlib.contextmanager
def read_errors(what: Path | str, hint: str = "Save it again with save_pretrained") -> Iterator[None]:
    """Turn whatever a library raises over a policy's files into one error: they check with all kinds of exceptions."""
    try:
        yield
    except NanoskyrlError:
        raise
    except Exception as error:
        name = what if isinstance(what, str) else f"`{what}`"
        raise InputError(f"{name} does not load: {type(error).__name__}: {first_line(error)}", hint=hint) from error


def text_config(policy: Path) -> dict[str, Any]:
    """Return what config.json says of the language model, that of the base for an adapter.

    Raises:
        InputError: it is not there, or cannot be read.
    """
    file = (find_base(policy) if is_adapter(policy) else policy) / "config.json"
    with read_errors(file, "Name a Hugging Face model directory"):
        whole = json.loads(file.read_bytes())
        return dict(whole.get("text_config") or whole)


def count_parameters(policy: Path) -> int:
    """Return how many numbers a policy's files of weights hold, from their headers alone."""
    total = 0
    for path in policy_files(policy):
        if path.suffix == ".bin":
            import torch

            with read_errors(path):
                tensors = torch.load(path, map_location="meta", weights_only=True, mmap=True)
                total += sum(tensor.numel() for tensor in tensors.values())
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total
