"""Whether the text of rows is what their tokens say, and would be the same tokens again: counted, never a fault.

Training reads tokens alone. Text that decodes otherwise misleads whoever reads it, and text that encodes otherwise
shows what encoding it again would have cost. The tokenizer is read by its file: no code of a policy runs.
"""

from pathlib import Path

import pyarrow as pa

from nanoskyrl.stages.core.rows import clean_text
from nanoskyrl.stages.looking.proof.findings import Findings
from nanoskyrl.stages.looking.tokens import TOKENIZER, read_tokenizer

PAIRS = (("prompt", "prompt_ids"), ("response", "response_ids"))


class Texts:
    """Counts of rows, of all tables that were looked at."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self.rows = self.unread = self.decoded_otherwise = self.encoded_otherwise = 0

    def look(self, table: pa.Table, policy: Path) -> None:
        """Compare the texts of a table with its tokens, by the tokenizer of the policy that sampled them."""
        tokenizer = read_tokenizer(policy / TOKENIZER)
        for text_name, ids_name in PAIRS:
            pairs = zip(table.column(text_name).to_pylist(), table.column(ids_name).to_pylist(), strict=True)
            known = [(text, ids) for text, ids in pairs if text is not None and ids is not None]
            if tokenizer is None:
                self.unread += len(known)
                continue
            decoded = tokenizer.decode_batch([ids for _, ids in known], skip_special_tokens=False)
            encoded = tokenizer.encode_batch_fast([text for text, _ in known], add_special_tokens=False)
            self.rows += len(known)
            self.decoded_otherwise += sum(clean_text(d) != text for d, (text, _) in zip(decoded, known, strict=True))
            self.encoded_otherwise += sum(e.ids != ids for e, (_, ids) in zip(encoded, known, strict=True))

    def note(self, findings: Findings) -> None:
        """Tell what was found."""
        findings.proved["texts"] += self.rows - self.decoded_otherwise
        if self.decoded_otherwise:
            findings.notes.append(f"{self.decoded_otherwise} of {self.rows} texts are not what their tokens decode to")
        if self.encoded_otherwise:
            findings.notes.append(
                f"{self.encoded_otherwise} of {self.rows} texts would be other tokens if encoded again"
            )
        if self.unread:
            findings.recorded.append(f"{self.unread} texts, whose policy has no tokenizer.json")
