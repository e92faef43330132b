"""Draw, for each surrogate, the weight of a token's gradient against its ratio.

python docs/plot_surrogates.py    writes docs/plots/*.svg
"""

from pathlib import Path

import matplotlib as mpl
import torch

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.surrogates.cispo import CISPO, CispoConfig
from nanoskyrl.algos.surrogates.clip import ClipConfig
from nanoskyrl.algos.surrogates.dapo import DAPO, DapoConfig
from nanoskyrl.algos.surrogates.dppo import DPPO_KL, DPPO_TV, DppoKlConfig, DppoTvConfig
from nanoskyrl.algos.surrogates.gmpo import GMPO, GmpoConfig
from nanoskyrl.algos.surrogates.gspo import GSPO, GspoConfig
from nanoskyrl.algos.surrogates.ppo import PPO
from nanoskyrl.algos.surrogates.sapo import SAPO, SapoConfig

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "nanoskyrl"  # the same bytes each time

OLD = 0.3  # probability of the token before; only dppo looks at it
PLOTS = Path(__file__).parent / "plots"
DRAWN: dict[str, tuple[Algorithm, object, float, str]] = {
    "clip": (PPO, ClipConfig(), 3.0, "ppo, grpo"),
    "dual_clip": (PPO, ClipConfig(clip_ratio_c=3.0), 5.0, "clip_ratio_c 3"),
    "dapo": (DAPO, DapoConfig(), 3.0, "dapo"),
    "sapo": (SAPO, SapoConfig(), 5.0, "sapo"),
    "gspo": (GSPO, GspoConfig(), 1.001, "gspo, ratio of a row"),
    "dppo_tv": (DPPO_TV, DppoTvConfig(), 3.0, "dppo_tv, from 0.3"),
    "dppo_kl": (DPPO_KL, DppoKlConfig(), 3.0, "dppo_kl, from 0.3"),
    "gmpo": (GMPO, GmpoConfig(), 3.0, "gmpo, row of one token"),
    "cispo": (CISPO, CispoConfig(), 8.0, "cispo"),
}
"""By file: algorithm, settings, largest ratio, title."""


def weights(algorithm: Algorithm, config: object, ratios: torch.Tensor, advantage: float) -> torch.Tensor:
    """Return the slope of the objective by log p at each ratio, over the advantage; one row a ratio."""
    logprobs = (OLD * ratios).log()[:, None].requires_grad_()
    ones = torch.ones_like(logprobs)
    inputs = algorithm.inputs(logprobs, (OLD * ones).log(), advantage * ones, ones)
    algorithm.surrogate(inputs, config)[0].sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad[:, 0] / advantage


def main() -> None:
    """Draw all of them."""
    import matplotlib.pyplot as plt

    PLOTS.mkdir(exist_ok=True)
    for name, (algorithm, config, largest, title) in DRAWN.items():
        least = 2 - largest if largest < 1.1 else 0.01
        ratios = torch.linspace(least, largest, 400, dtype=torch.float64)
        figure, axes = plt.subplots(figsize=(2.6, 2.0), layout="constrained")
        for advantage, style in ((1.0, "-"), (-1.0, "--")):
            axes.plot(ratios, weights(algorithm, config, ratios, advantage), style, label=f"A = {advantage:+.0f}")
        axes.set(title=title, xlabel="ratio", ylabel="weight")
        axes.ticklabel_format(useOffset=False)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7)
        figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
