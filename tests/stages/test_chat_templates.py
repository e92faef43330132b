"""A conversation with a tool under every chat template of trl's wheel, and under those of ours that it has none of."""

import numpy as np
import pytest
from chat_templates import OURS, shipped, tokenizer_with

from nanoskyrl.envs.tool_formats.own import with_tools_told
from nanoskyrl.envs.worlds.tool_use.environment import ToolUse, ToolUseConfig
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.engines.base import Generation, SamplingParams, TokenEngine
from nanoskyrl.stages.engines.turns import Attempt, Identity, TurnLimits, play
from nanoskyrl.stages.models.rendering import Renderer, answering

LIMITS = TurnLimits(max_turns=4, max_generate_length=4096, max_input_length=1 << 20, max_sequence_length=1 << 20)
ENVIRONMENT = ToolUse(ToolUseConfig())
TASK = ENVIRONMENT.tasks("train")[0]
EXPRESSION = TASK.prompt.removeprefix("What is ").removesuffix("?")
THOUGHT = "I think.\n</think>"
TEMPLATES = {**shipped(), **OURS}
EXPECTED = {
    # By the beginning of a template's name, the longest first: format, and what ends a turn of words and one of calls.
    "cohere2": ("own", "<|END_RESPONSE|>", None), "cohere": ("own", "<|END_OF_TURN_TOKEN|>", None),
    # R1's writes calls only for content that is null, which transformers leaves out.
    "deepseek_r1": ("own", "<｜end▁of▁sentence｜>", None),
    "deepseekv3": ("deepseek", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gemma4_v2": ("gemma4", "<turn|>", "<turn|>"), "gemma4": ("gemma4", "<turn|>", "<|tool_response>"),
    "diffusion_gemma": ("gemma4", "<turn|>", "<|tool_response>"), "gemma": ("own", "<end_of_turn>", None),
    "glm4moe": ("glm", "<|user|>", "<|observation|>"), "gptoss": ("harmony", "<|return|>", "<|call|>"),
    "idefics3": ("own", "<end_of_utterance>", None), "smolvlm": ("own", "<end_of_utterance>", None),
    "lfm2_2_5": ("lfm2", "<|im_end|>", "<|im_end|>"), "lfm2_v2": ("lfm2", "<|im_end|>", "<|im_end|>"),
    "lfm2": ("own", "<|im_end|>", None),  # tells of tools, and not of calls
    "llama3_1": ("llama_json", "<|eot_id|>", "<|eot_id|>"), "llama3_2": ("llama_json", "<|eot_id|>", "<|eot_id|>"),
    "llama3": ("own", "<|eot_id|>", None), "llava": ("own", "</s>", None),
    "muse": ("atem", "<|eot|>", "<|eot|>"), "nemotron_3": ("qwen_xml", "<|im_end|>", "<|im_end|>"),
    "phi3": ("own", "<|end|>", None), "qwen2_5_vl": ("own", "<|im_end|>", None),
    "qwen2_5": ("hermes", "<|im_end|>", "<|im_end|>"), "qwen3_5": ("qwen_xml", "<|im_end|>", "<|im_end|>"),
    "qwen3_6": ("qwen_xml", "<|im_end|>", "<|im_end|>"), "qwen3_8": ("qwen_xml", "<|im_end|>", "<|im_end|>"),
    "qwen3": ("hermes", "<|im_end|>", "<|im_end|>"),
    "our_mistral": ("mistral", "</s>", "</s>"),
    "our_deepseek": ("deepseek", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "our_qwen": ("qwen_xml", "<|im_end|>", "<|im_end|>"),
}  # fmt: skip


def expected(name):
    known = [prefix for prefix in EXPECTED if name.startswith(prefix)]
    return EXPECTED[max(known, key=len)] if known else None


class TemplateWriter(TokenEngine):
    """Writes what the template itself makes of an assistant's messages, up to the first token that ends a turn."""

    context_length = 1 << 20

    def __init__(self, renderer, tools):
        self.renderer, self.tools, self.history, self.sampled = renderer, tools, [], []
        self.native = renderer.template.shape is not None

    @property
    def stop_ids(self):
        return self.renderer.turn_end_ids

    def load(self, policy): ...

    def logprobs(self, token_ids): ...

    def rendered(self, messages, *, generate):
        """Return the template's own rendering."""
        tools = self.tools
        if not self.renderer.template.shows_tools:
            messages, tools = with_tools_told(messages, tools, self.renderer.template.form), None
        if not self.native:  # no template writes what it has no place for
            messages = self.renderer.template.shown(messages)
        return self.renderer.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generate, tokenize=False
        )

    def write(self, said):
        before = self.rendered(self.history, generate=True)
        whole = self.rendered([*self.history, said], generate=False)
        if whole.startswith(before):
            text = whole[len(before) :]
        else:  # the prompt has opened reasoning, which the template leaves out of its history
            assert before.endswith("<think>\n")
            text = whole.removeprefix(before.removesuffix("<think>\n"))
            text = text if "</think>" in text else THOUGHT + "\n\n" + text.lstrip("\n")
        ids = self.renderer.encode(text)
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        if end is None:  # the next message's beginning ends the turn
            marks = expected(self.name)
            ids += self.renderer.encode(marks[2] if said.get("tool_calls") else marks[1])
            return ids
        return ids[: end + 1]

    def generate(self, requests, sampling):
        assert len(requests) == 1
        self.sampled.append(self.write(self.script[len(self.sampled)]))
        self.history += [self.script[len(self.sampled) - 1], *self.results[len(self.sampled) - 1 :][:1]]
        ids = self.sampled[-1]
        return [Generation(token_ids=ids, rollout_logprobs=np.zeros(len(ids), np.float32), finish_reason="stop")]


def script(engine, name):
    """Return what is said: a call, and the answer; with reasoning where the prompt asks for it."""
    as_text = name.startswith(("deepseekv3", "our_deepseek")) and not name.endswith("_training")
    args = {"expression": EXPRESSION}
    if engine.native:
        function = {"name": "calculator", "arguments": f'{{"expression": "{EXPRESSION}"}}' if as_text else args}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        }
    else:
        text = f'<tool_call>{{"tool": "calculator", "args": {{"expression": "{EXPRESSION}"}}}}</tool_call>'
        call = {"role": "assistant", "content": text}
    answer = {"role": "assistant", "content": f"<answer>{TASK.ground_truth}</answer>"}
    if engine.rendered(engine.history, generate=True).endswith("<think>\n"):
        if as_text or name.startswith("deepseekv3"):  # shows what was said beside a call as it was said
            call["content"] = THOUGHT
        elif not engine.native:
            call["content"] = f"{THOUGHT}\n\n{call['content']}"
        elif engine.renderer.template.reasoning_key:
            call, answer = ({**said, "reasoning_content": "I think."} for said in (call, answer))
    return [call, answer]


def carried_out(name):
    """Play the conversation; return the engine, its renderer and the rows."""
    renderer = Renderer(tokenizer_with(TEMPLATES[name]))
    start = ENVIRONMENT.start().reset(TASK, 0)
    engine = TemplateWriter(renderer, list(start.tools))
    engine.name, engine.history = name, list(start.messages)
    engine.script = script(engine, name)
    result = {"role": "tool", "content": str(TASK.ground_truth)}
    if engine.native and expected(name)[0] != "hermes":
        result |= {"tool_call_id": "call00000", "name": "calculator"}
    engine.results = [result]
    attempt = Attempt(
        TASK,
        Identity(
            trajectory_id="a", group_id="g", sample=0, env="tool_use", seed=7, policy_version=0, policy_digest="d" * 64
        ),
        ENVIRONMENT, engine, SamplingParams(), LIMITS, stepwise=not renderer.keeps_prefix,
    )  # fmt: skip
    play([attempt], engine, SamplingParams(), Stopwatch())
    return engine, renderer, attempt.rows()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_in_the_templates_own_format_is_carried_out_and_its_tokens_are_the_templates(name):
    engine, renderer, rows = carried_out(name)
    to_table(rows)
    last = rows[-1]
    assert (last.status, last.error) == ("completed", None)
    turns = [turn for row in rows for turn in row.turns]
    (call,) = turns[0].tool_calls
    assert (call.tool, call.args, call.ok) == ("calculator", {"expression": EXPRESSION}, True)
    assert not turns[1].tool_calls
    assert ENVIRONMENT.score(last).success

    # Sampled tokens are trained on, and no others; each turn ends with what ends it.
    sampled = [row.response_ids[row.loss_mask == 1].tolist() for row in rows]
    assert sampled == ([[*engine.sampled[0], *engine.sampled[1]]] if len(rows) == 1 else engine.sampled)
    assert (len(rows) == 1) == renderer.keeps_prefix
    assert all(ids[-1] in renderer.turn_end_ids for ids in engine.sampled)

    # Prompts, and where the prefix is kept the whole conversation, are what the template makes of it.
    first = [*ENVIRONMENT.start().reset(TASK, 0).messages]
    whole = [*first, engine.script[0], *engine.results, engine.script[1]]
    assert last.prompt_ids.tolist() == tokens(
        renderer, engine.rendered(whole[: -1 if len(rows) > 1 else 1], generate=True)
    )
    if renderer.keeps_prefix:
        ids = [*last.prompt_ids.tolist(), *last.response_ids.tolist()]
        assert tokens(renderer, engine.rendered(whole, generate=False))[: len(ids)] == ids


def tokens(renderer, text):
    return renderer.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if expected(name)])
def test_the_format_and_the_ends_of_turns_are_found(name):
    form, end, end_of_call = expected(name)
    renderer = Renderer(tokenizer_with(TEMPLATES[name]))
    assert renderer.template.form is lookup("tool_format", form)
    assert renderer.decode([renderer.turn_end_id]) == end
    assert {renderer.decode([token]) for token in renderer.turn_end_ids} == {end, end_of_call or end}


def test_there_are_templates_to_look_at():
    if not shipped():
        pytest.skip("trl is not installed, whose chat templates are looked at")
    assert len(shipped()) > 60


def shipped_renderer(name):
    if name not in TEMPLATES:
        pytest.skip("trl is not installed, or ships this template no longer")
    return Renderer(tokenizer_with(TEMPLATES[name]))


def test_gpt_oss_keeps_what_it_thought_before_a_call_and_loses_it_after_an_answer():
    renderer = shipped_renderer("gptoss")
    text = (
        "<|channel|>analysis<|message|>I need it.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>A moment.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>"
        '{"expression": "2*3"}'
    )
    action, said = renderer.heard(text, ENVIRONMENT.start().reset(TASK, 0).tools, 7)
    call = '<tool_call>{"tool": "calculator", "args": {"expression": "2*3"}}</tool_call>'
    assert action == f"<think>I need it.</think>A moment.{call}"
    assert said["tool_calls"][0]["id"] == "call00007"
    asked = {"role": "user", "content": "Q"}
    result = {"role": "tool", "content": "6", "tool_call_id": "call00007", "name": "calculator"}
    prompt = renderer.prompt([asked, said, result])
    assert "<|channel|>analysis<|message|>I need it.\nA moment.<|end|>" in prompt
    action, answer = renderer.heard("<|channel|>final<|message|><answer>6</answer>")
    assert action == answer["content"] == "<answer>6</answer>"
    assert "I need it." not in renderer.prompt([asked, said, result, answer, asked])


def test_several_calls_of_one_turn_are_shown_one_a_message_where_a_template_takes_one():
    renderer = shipped_renderer("gptoss")
    calls = "".join(
        f'<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{"n": {n}}}<|call|>'
        for n, name in enumerate(("look", "find"))
    )
    _, said = renderer.heard(calls.removeprefix("<|start|>assistant"))
    results = [{"role": "tool", "content": f"result {n}"} for n in range(2)]
    prompt = renderer.prompt([{"role": "user", "content": "Q"}, said, *answering(said, results)])
    order = ["to=functions.look", "functions.look to=assistant", "result 0", "to=functions.find", "result 1"]
    assert [prompt.index(text) for text in order] == sorted(prompt.index(text) for text in order)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_nano"])
def test_thinking_is_switched_off_by_an_argument(name):
    renderer = shipped_renderer(name)
    asked = [{"role": "user", "content": "Q"}]
    off = renderer.under({"enable_thinking": False}, "auto")
    assert "</think>" in off.prompt(asked) or "/nothink" in off.prompt(asked)
    assert "</think>" not in renderer.prompt(asked)
    assert off.turn_end_ids == renderer.turn_end_ids


def test_a_format_insisted_on_is_told_in_words_and_read_where_the_template_has_another():
    renderer = shipped_renderer("lfm2").under({}, "lfm2")  # which tells of tools, and not of calls
    tools = ENVIRONMENT.start().reset(TASK, 0).tools
    assert "<|tool_call_start|>[NAME(ARGUMENT=" in renderer.prompt([{"role": "user", "content": "Q"}], tools)
    action, _ = renderer.heard("<|tool_call_start|>[calculator(expression='2*3')]<|tool_call_end|>", tools)
    assert action == '<tool_call>{"tool": "calculator", "args": {"expression": "2*3"}}</tool_call>'
