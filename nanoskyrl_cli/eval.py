"""`skyrl eval`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nanoskyrl.stages.core.errors import NanoskyrlError, SettingsError, ShortError, did_you_mean
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import (
    ConfigOption,
    EnvOption,
    ExecutorOption,
    ForceOption,
    OutOption,
    RunOption,
    SetOption,
    finish,
    open_session,
    path,
    policy_path,
    print_data,
    say,
)
from nanoskyrl_cli.progress import working


def evaluate(
    env: EnvOption = None,
    bench: Annotated[
        str | None,
        typer.Option(
            help="Benchmarks, separated by commas (see skyrl list bench), or `default`: hle,swe_bench_verified.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="`starter`, a directory or a hub id; default: the run's newest.", show_default=False),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="hf, vllm, openai or scripted (the gold answers).", show_default=False)
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="OpenAI-compatible address, such as http://127.0.0.1:8000/v1.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the endpoint.", show_default=False)] = None,
    judge_endpoint: Annotated[
        str | None, typer.Option(help="Address of the judge, for benchmarks that have one.", show_default=False)
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's name there.", show_default=False)] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows of a benchmark, as BENCH=FILE, or FILE where there is one; may be repeated.", show_default=False
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Tasks; 0 takes all. Default: 100, or 512 of an environment.", show_default=False),
    ] = None,
    n_samples: Annotated[int | None, typer.Option(help="Samples of each.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default=False)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the choice of tasks, and of sampling.", show_default=False)
    ] = None,
    prices: Annotated[
        str | None, typer.Option(help="TOML or JSON file: what a million tokens of a model cost.", show_default=False)
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Two finished evaluations, to be set side by side.", metavar="A B", show_default=False),
    ] = None,
    executor: ExecutorOption = None,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    force: ForceOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: output and numbers, each by benchmark or environment.")
    ] = False,
) -> int:
    """Measure a policy or an endpoint on benchmarks or held-out tasks: success with its interval, pass@k, cost.

    Example: skyrl eval --bench gsm8k --data test.jsonl --limit 100
    """
    if compare is not None:
        return _compare(compare, as_json)
    if endpoint is not None and engine not in (None, "openai"):
        raise SettingsError(
            f"`--endpoint` is asked by the engine openai, and `--engine` is {engine}", hint="Leave one of them out"
        )
    flags: dict[str, dict[str, Any]] = {
        "run": {"executor": executor},
        "eval": {
            "env": env, "limit": limit, "n_samples": n_samples, "temperature": temperature, "seed": seed,
            "prices": prices,
        },
        "rollout": {"engine": engine or ("openai" if endpoint else None)},
        "openai": {"base_url": endpoint, "model": model},
    }  # fmt: skip
    names = _names(bench, env, endpoint)
    for name, values in _bench_flags(names, data, judge_endpoint, judge_model).items():
        flags[name] = {**flags.get(name, {}), **values}
    session = open_session(run, config, assignments, flags)
    return _run(session, names or session.evaluated(), policy_path(policy), path(out), force, as_json)


def _run(session: Any, names: Sequence[str | None], policy: Any, out: Path | None, force: bool, as_json: bool) -> int:
    """Run benchmarks one after the other, each to its end, or the environment; return the largest exit code."""
    from nanoskyrl.stages.eval import check_ahead
    from nanoskyrl.stages.looking.eval_report import summary_of

    if len(names) > 1:  # a single one looks by itself
        check_ahead([name for name in names if name is not None], session.settings)
    summaries, outputs, code = {}, {}, 0
    for name in names:
        place = out / name if out is not None and name is not None else out
        try:
            with working("eval" if name is None else f"eval: {name}"):
                outcome = session.eval(name, policy=policy, output=place, force=force)
        except ShortError as error:  # the next benchmark may be answered again
            say(f"error: {error}\n\nhint: {error.hint}")
            code = max(code, error.exit_code)
            continue
        except (NanoskyrlError, OSError):  # it ends the command, and what was found before is worth as much
            if summaries:
                _report(summaries, outputs, as_json)
            raise
        of = outcome.manifest.settings["rollout"]["env"]
        summaries[of], outputs[of] = summary_of(outcome.output), str(outcome.output)
        limit, there = session.settings.get("eval", {}).get("limit"), len(summaries[of]["task_ids"])
        if limit and there < limit:
            say(f"`eval.limit` is {limit}, and there are {there} tasks: all of them were taken")
        code = max(code, finish(outcome, session, None, as_json=False))
    _report(summaries, outputs, as_json)
    return code


def _report(summaries: dict[str, Any], outputs: dict[str, str], as_json: bool) -> None:
    """Print the numbers of what was evaluated."""
    from nanoskyrl.stages.looking.eval_report import table

    print_data({"output": outputs, "numbers": summaries}, [table(summaries)] if summaries else [], as_json)


def _names(bench: str | None, env: str | None, endpoint: str | None) -> list[str]:
    """Return the benchmarks that are asked for: an endpoint without further words gets the default ones."""
    from nanoskyrl.stages.eval import DEFAULT_BENCHES

    if bench is None:
        return list(DEFAULT_BENCHES) if endpoint and not env else []
    if env is not None:
        raise SettingsError("`--bench` and `--env` were both given", hint="Evaluate them one after the other")
    names = [name.strip() for name in bench.split(",") if name.strip()]
    return list(dict.fromkeys(one for name in names for one in (DEFAULT_BENCHES if name == "default" else (name,))))


def _bench_flags(
    names: list[str], data: list[str] | None, judge_endpoint: str | None, judge_model: str | None
) -> dict[str, dict[str, Any]]:
    """Return the settings of benchmarks that flags stand for."""
    from nanoskyrl.stages.core.config import config_class
    from nanoskyrl.stages.core.registry import lookup, names as known_names

    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in data or ():
        name, sign, file = text.partition("=")
        if not sign and len(names) == 1:
            name, file = names[0], text
        if name not in found:
            raise SettingsError(
                f"`--data {text}` names no benchmark that is run",
                hint=did_you_mean(name, names) or "Write it as BENCH=FILE",
            )
        found[name]["data"] = file
    judge = {"judge_endpoint": judge_endpoint, "judge_model": judge_model}
    for name in names:
        lookup("env" if name in known_names("env") else "bench", name)  # a misspelt one gets its own message
        known = getattr(config_class(name), "__dataclass_fields__", {})
        found[name] |= {key: value for key, value in judge.items() if value is not None and key in known}
    return {name: values for name, values in found.items() if values}


def _compare(places: tuple[str, str], as_json: bool) -> int:
    from nanoskyrl.stages.looking.eval_report import compare, comparison

    found = compare(*map(as_path, places))
    print_data(found, [comparison(found)], as_json)
    return 0
