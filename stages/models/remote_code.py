"""Whether code that lies in a policy's folder (`auto_map` in its config) may run: only where the user says so.

Every load of a model, tokenizer or config passes `trust()`, so that transformers never asks on the terminal.
"""

_allowed = False


def allow_code(allowed: bool) -> None:
    """Set for this process what `run.trust_remote_code` says."""
    global _allowed
    _allowed = allowed


def trust() -> dict[str, bool]:
    """Return the keyword that loading from a folder takes."""
    return {"trust_remote_code": _allowed}
