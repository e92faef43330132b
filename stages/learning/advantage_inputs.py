"""What `advantage` works on: a scored batch, on disk or in memory, and the models that some columns need."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.shards import read_part, read_parts
from nanoskyrl.stages.core.table_checks import check, check_some
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
        self.scored, self.source, self.watch = scored, source, watch
        asked = ((models.policy, bool(asks - {"ref_logprobs"})), (models.reference, "ref_logprobs" in asks))
        self._asked = [model for model, is_asked in asked if is_asked and model is not None]

    def __len__(self) -> int:
        return len(self.source.parts)

    def part(self, index: int) -> pa.Table:
        """Return a part, whole.

        Raises:
            InputError: it is not what `score` writes, or holds a token that a model does not know.
        """
        part = self.source.parts[index]
        table = read_part(self.scored / part.name, part.digest)
        check(table, "score")
        for model in self._asked:
            check_token_ids(table, self.scored, model)
        return table

    def columns(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield some columns of each part."""
        for table in read_parts(self.scored, self.source, names):
            with self.watch("check"):
                check_some(table, "score")
            yield table


class Held:
    """A batch in memory, checked."""

    def __init__(self, table: pa.Table) -> None:
        """Keep the rows, which are one part."""
        self.table = table

    def __len__(self) -> int:
        return 1

    def part(self, index: int) -> pa.Table:
        """Return all rows."""
        return self.table

    def columns(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield some columns."""
        yield self.table.select(list(names))
