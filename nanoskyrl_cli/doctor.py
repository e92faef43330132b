"""`skyrl doctor`."""

from dataclasses import asdict

from nanoskyrl_cli.options import JsonOption, emit, print_json


def doctor(as_json: JsonOption = False) -> int:
    """Say what this machine can do, and what to install for the rest.

    Example: skyrl doctor
    """
    from nanoskyrl.stages.looking.doctor import examine

    checks = examine()
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            emit(f"{'ok  ' if check.ok else 'no  '} {check.name:<{width}}  {check.found}")
            if not check.ok and check.remedy:
                emit(f"     {'':<{width}}  {check.remedy}")
    return 0 if all(check.ok for check in checks if check.needed) else 1
