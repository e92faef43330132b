"""Write the rows of SWE-bench Multilingual's layout that the tests use; they are ours, and measure nothing."""

import json
from pathlib import Path

PATCH = """diff --git a/src/add.js b/src/add.js
--- a/src/add.js
+++ b/src/add.js
@@ -1,3 +1,3 @@
 function add(a, b) {
-  return a - b;
+  return a + b;
 }
"""
TEST_PATCH = """diff --git a/test/add.test.js b/test/add.test.js
--- /dev/null
+++ b/test/add.test.js
@@ -0,0 +1,1 @@
+test("adds", () => expect(add(1, 2)).toBe(3));
"""


def rows() -> list[dict]:
    """Return one row in the new layout, and the same in the old one."""
    common = {
        "repo": "example/add-js",
        "base_commit": "0" * 40,
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "problem_statement": "add(1, 2) returns -1.",
        "hints_text": "",
        "created_at": "2025-01-01T00:00:00Z",
        "version": "1.0",
    }
    new = {
        **common, "instance_id": "example__add-js-1", "FAIL_TO_PASS": ["adds"], "PASS_TO_PASS": [],
        "image": "example/add-js:1", "eval_script": "#!/bin/bash\nnpx jest --verbose\n", "log_parser": "parse_log_jest",
        "eval_type": "pass_and_fail",
    }  # fmt: skip
    old = {**common, "instance_id": "example__add-js-2", "FAIL_TO_PASS": '["adds"]', "PASS_TO_PASS": "[]"}
    return [new, old]


if __name__ == "__main__":
    target = Path(__file__).parent / "swe_bench_multilingual.jsonl"
    target.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
