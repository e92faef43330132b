"""Write the parts of docs/*.md that are made from code, or check that they agree with it.

python docs/render.py            writes
python docs/render.py --check    ends with 1 if a page is out of date
"""

import sys
from pathlib import Path

BEGIN, END = "<!-- made by docs/render.py -->", "<!-- end -->"
DOCS = Path(__file__).parent


def columns() -> str:
    """Return the table of columns."""
    from nanoskyrl.stages.core.trajectory import COLUMNS

    lines = ["| Column | Type | From | Null | Meaning |", "| --- | --- | --- | --- | --- |"]
    for c in COLUMNS:
        of = str(c.type).replace("<element: ", "\\<").replace(">", ">") if c.name != "turns" else "list\\<struct>"
        lines.append(f"| {c.name} | {of} | {c.stage} | {'may be' if c.nullable else 'never'} | {c.meaning} |")
    return "\n".join(lines)


def commands() -> str:
    """Return every command with its arguments and options."""
    from nanoskyrl_cli.main import COMMANDS, loaded

    lines = []
    for name, *_ in COMMANDS:
        command = loaded(name)
        words, _, example = (command.help or "").partition("Example:")
        lines += [f"## skyrl {name}", "", " ".join(words.split()), "", "```console", f"$ {example.strip()}", "```", ""]
        lines += ["| Argument or option | Meaning |", "| --- | --- |"]
        for param in command.params:
            if param.name == "help":
                continue
            shown = (
                ", ".join(f"`{opt}`" for opt in param.opts)
                if param.param_type_name == "option"
                else f"`[{param.name.upper()}]`"
            )
            default = "" if param.default in (None, False) or callable(param.default) else f" Default {param.default}."
            lines.append(f"| {shown} | {getattr(param, 'help', '') or ''}{default} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def algorithms() -> str:
    """Return the table of algorithms with what each was published with."""
    from nanoskyrl.stages.core.registry import ALGOS, lookup

    lines = [
        "| `--algo` | Source | Estimator | Reduction | KL, off until asked for | Besides |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in ALGOS:
        a = lookup("algo", name)
        kl = "none" if a.kl_place == "none" else f"{a.kl_estimator} in the {a.kl_place}"
        besides = [
            *(["critic"] if a.needs_critic else []),
            *(["soft overlong punishment"] if a.overlong_punishment else []),
            *(["dynamic sampling"] if a.dynamic_sampling else []),
        ]
        lines.append(f"| {name} | {a.source} | {a.estimator} | {a.loss_reduction} | {kl} | {', '.join(besides)} |")
    return "\n".join(lines)


def promises() -> str:
    """Return the table of what the sandboxes promise."""
    from nanoskyrl.envs.sandbox.promises import PROMISES

    lines = ["| Promise | Attacks | What is promised |", "| --- | --- | --- |"]
    lines += [f"| {name} | {len(promise.attacks)} | {promise.text} |" for name, promise in PROMISES.items()]
    return "\n".join(lines)


def settings() -> str:
    """Return every table of settings: key, type and range, default, meaning."""
    import dataclasses

    from nanoskyrl.stages.core.checked import field_docs, hints_of, range_text, type_text
    from nanoskyrl.stages.core.config import config_class, tables
    from nanoskyrl.stages.looking.template import toml_text

    lines = []
    for table in tables():
        found = config_class(table)
        assert found is not None
        lines += [f"## [{table}]", "", (found.__doc__ or "").splitlines()[0], ""]
        fields = [field for field in dataclasses.fields(found) if "of_run" not in field.metadata]
        lines += ["| Key | Type and range | Default | Meaning |", "| --- | --- | --- | --- |"] if fields else []
        config = found()
        for field in fields:
            of, default = hints_of(found)[field.name], getattr(config, field.name)
            ranged = range_text(of)
            shown = "unset" if default is None else toml_text(default).replace("\n", " ")
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            meaning = field_docs(found).get(field.name, "")
            cells = [f"`{field.name}`", f"{type_text(of)}{ranged and ': '}{ranged}", f"`{shown}`", meaning]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


PAGES = {
    "trajectory.md": columns,
    "cli.md": commands,
    "algorithms.md": algorithms,
    "settings.md": settings,
    "../SECURITY.md": promises,
}


def render(page: str) -> tuple[str, str]:
    """Return a page's text as it is and as it should be."""
    text = (DOCS / page).read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return text, f"{before}{BEGIN}\n{PAGES[page]()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write or check the pages named, or all."""
    named = [Path(a).name for a in arguments if not a.startswith("-")]
    pages = [page for page in PAGES if not named or Path(page).name in named]
    stale = []
    for page in pages:
        found, wanted = render(page)
        if found == wanted:
            continue
        stale.append(page)
        if "--check" not in arguments:
            (DOCS / page).write_text(wanted, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"out of date: {', '.join(stale)}; run `python docs/render.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
