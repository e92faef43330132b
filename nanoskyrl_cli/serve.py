"""`skyrl serve`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import ConfigOption, PolicyOption, RunOption, SetOption, open_session, say


def serve(
    gpus: Annotated[
        str | None, typer.Option(help="0-3, 0,2 or cpu; default: all there are.", show_default=False)
    ] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="GPUs of one server.", show_default=False)] = None,
    policy: PolicyOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Keep vLLM servers up for a run until Ctrl-C; its commands find them and bring them to their policies.

    Example: skyrl serve --gpus 0-3
    """
    from nanoskyrl.stages.engines.vllm.serve import serve as stage

    flags = {"vllm": {"gpus": gpus, "tensor_parallel": tensor_parallel}}
    session = open_session(run, config, assignments, flags)
    stage(session.run, session.places.newest_policy(policy), session.engine_config("vllm"), say=say)
    say("Stopped.")
