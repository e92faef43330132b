"""What `advantage` works on: a scored batch, and the models that some columns need."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from nanoskyrl.stages.core.manifest import Manifest, Part
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.shards import read_checked, read_parts
from nanoskyrl.stages.core.table_checks import check_some
from nanoskyrl.stages.models.vocabulary import check_token_ids

if TYPE_CHECKING:
    from nanoskyrl.stages.learning.model_columns import Passes


class Models(NamedTuple):
    """What columns that need a model are computed with."""

    policy: Path | None = None
    """What training starts from."""
    reference: Path | None = None
    passes: "Passes | None" = None
    """Models that are up."""


NO_MODELS = Models()


class Stored:
    """A batch on disk: its parts are read when they are needed, and checked where they are read whole."""

    def __init__(self, scored: Path, source: Manifest, asks: set[str], models: Models, watch: Stopwatch) -> None:
        """Read nothing yet; tokens will be held against every model that is asked about them."""
        self.scored, self.source, self.asks, self.models, self.watch = scored, source, asks, models, watch
        asked = ((models.policy, bool(asks - {"ref_logprobs"})), (models.reference, "ref_logprobs" in asks))
        self._asked = [model for model, is_asked in asked if is_asked and model is not None]

    def part(self, part: Part) -> pa.Table:
        """Return a part, whole.

        Raises:
            InputError: it is not what `score` writes, or holds a token that a model does not know.
        """
        table = read_checked(self.scored, "score", part)
        for model in self._asked:
            check_token_ids(table, self.scored, model)
        return table

    def columns(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield some columns of each part."""
        for table in read_parts(self.scored, self.source, names):
            with self.watch("check"):
                check_some(table, "score")
            yield table
