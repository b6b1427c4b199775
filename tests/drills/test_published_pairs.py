"""Pairs with the tokenizer and the chat template of a published model: the tokens and losses are transformers'."""
import json

import pytest
import torch

from common.errors import UsageError
from language import gpt, llama, pairs, preferences

TEMPLATE = """{{ bos_token }}{% for message in messages %}\
{% if message.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}\
<|start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{% else %}{{ message.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "four"}, {"role": "user", "content": "and one more?"},
        {"role": "assistant", "content": "five, which is odd"}]


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="no transformers: pip install -r requirements/drill.txt")


@pytest.fixture
def save(transformers, tmp_path):
    """Return a function that saves a tokenizer with a template, which adds a token at the start of plain text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    def make(template, single="<|begin|> $A"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator([json.dumps(CHAT)] * 3, trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|begin|>", "<|start|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<|begin|>", "<|end|>")])
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>",
                                             chat_template=template).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return make


def test_the_answers_of_a_chat_are_those_that_transformers_marks(save):
    coder = pairs.Published(save(TEMPLATE))
    wanted = coder.made.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    tokens, counted, _ = pairs.encode("here", {"messages": CHAT}, coder)
    assert tokens == wanted["input_ids"] and tokens.count(coder.made.bos_token_id) == 1
    assert counted == [bool(mask) for mask in wanted["assistant_masks"]] and sum(counted) > 10
    tokens, counted, prompt = pairs.encode("here", {"prompt": CHAT[:4], "completion": CHAT[4:]}, coder)
    asked = coder.made.apply_chat_template(CHAT[:4], add_generation_prompt=True)["input_ids"]
    assert prompt == len(asked) and counted == [False] * prompt + [True] * (len(tokens) - prompt)  # as TRL does


def test_plain_text_has_the_special_tokens_of_the_tokenizer(save):
    coder = pairs.Published(save(TEMPLATE))
    tokens, counted, prompt = pairs.encode("here", {"prompt": "2 + 2?", "completion": " four"}, coder)
    assert coder.decode(tokens) == "<|begin|>2 + 2? four<|end|>"
    assert coder.decode([token for token, count in zip(tokens, counted) if count]) == " four<|end|>"
    assert tokens[:prompt] == coder.made("2 + 2?")["input_ids"]


@pytest.mark.parametrize(("single", "start"), [("<|begin|> $A <|end|>", "<|begin|>"), ("$A <|end|>", "")])
def test_an_end_token_that_the_tokenizer_appends_is_left_out(save, single, start):
    coder = pairs.Published(save(TEMPLATE, single))
    tokens, counted, prompt = pairs.encode("here", {"prompt": "2 + 2?", "completion": " four"}, coder)
    assert coder.decode(tokens) == f"{start}2 + 2? four<|end|>" and coder.decode(tokens[:prompt]) == f"{start}2 + 2?"
    assert counted == [False] * prompt + [True] * (len(tokens) - prompt)
    assert pairs.ask("here", {"prompt": "2 + 2?"}, coder, None) == tokens[:prompt]
    chat, _, _ = pairs.encode("here", {"messages": CHAT}, coder)
    assert coder.decode(chat) == coder.render(CHAT, False)  # the template has written its end


@pytest.mark.parametrize(("template", "rows", "said"), [
    (TEMPLATE, [{"role": "critic", "content": "a"}, *CHAT], "chat.jsonl:1: the chat template refuses it: no critics"),
    (TEMPLATE.replace("{% generation %}{{ message.content }}",
                      "{% generation %}{{ message.content if loop.last else 'cut' }}"), CHAT,
     "chat.jsonl:1: message 3: to ask for this answer, the chat template writes a text that"),
    (TEMPLATE.replace("<|start|>assistant", "<|start|>Assistant"), CHAT, "chat.jsonl:1: message 3: to ask"),
    (None, CHAT, "chat_template")])
def test_what_a_template_refuses_is_named(save, tmp_path, template, rows, said):
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": rows}) + "\n") * 3)
    with pytest.raises(UsageError, match=said):
        pairs.create_datasets("chat", str(tmp_path / "chat.jsonl"), save(template), 200, None, "drop")


def test_no_tokenizer_is_named(transformers, tmp_path):
    with pytest.raises(UsageError, match="--tokenizer .*/none: no such folder"):
        pairs.Published(str(tmp_path / "none"))
    with pytest.raises(UsageError, match=f"--tokenizer {tmp_path}: "):
        pairs.Published(str(tmp_path))


def test_the_loss_of_published_weights_is_that_of_transformers(transformers, save, tmp_path):
    """Three pairs share a window here; transformers gets them one at a time, and shifts the labels itself."""
    folder = save(TEMPLATE)
    torch.manual_seed(0)
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, rms_norm_eps=1e-5, tie_word_embeddings=True, initializer_range=0.3)).double()
    other.save_pretrained(folder)
    rows = [{"messages": CHAT[:3]}, {"prompt": CHAT[:4], "completion": CHAT[4:]}, {"prompt": "a", "completion": "b"}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    size = llama.size(folder)
    train, _ = pairs.create_datasets("chat", str(tmp_path / "chat.jsonl"), folder, 400, None, "drop", size.vocabulary)
    model = gpt.GPT(size, train.vocabulary).double()
    llama.load_weights(model, folder)
    inputs, targets = train.__getitems__([0])
    assert len(train) == 1
    expected = 0
    for row in rows:
        tokens, counted, _ = pairs.encode("here", row, train.coder)
        labels = torch.tensor([[token if count else -100 for token, count in zip(tokens, counted)]])
        expected += other(torch.tensor([tokens]), labels=labels).loss * sum(counted)
    assert pairs.sum_loss(model(inputs), targets).item() == pytest.approx(expected.item(), rel=1e-5)  # in float32 there
    said = pairs.answer(model.float(), train, "2 + 2?", 0)
    assert said.startswith("<|begin|><|start|>user\n2 + 2?<|end|>\n<|start|>assistant\n")


@pytest.mark.parametrize("rows", [
    [{"prompt": CHAT[:4], "chosen": CHAT[4:], "rejected": [{"role": "assistant", "content": words}]}
     for words in ("six", "seven, or perhaps eight")],
    [{"chosen": CHAT[:3], "rejected": [*CHAT[:2], {"role": "assistant", "content": "nobody knows"}]}] * 3,
    [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"}, {"prompt": "one", "chosen": " two", "rejected": "!"}]])
def test_the_loss_of_preferences_is_that_of_trl(transformers, save, tmp_path, rows):
    trl = pytest.importorskip("trl", reason="no TRL: pip install -r requirements/drill.txt")
    from datasets import Dataset

    folder, both = save(TEMPLATE), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        both.append(transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, rms_norm_eps=1e-5, tie_word_embeddings=True, initializer_range=0.3)).double())
        both[-1].save_pretrained(tmp_path / str(seed))
    model, reference = both
    args = trl.DPOConfig(str(tmp_path / "trl"), beta=0.05, per_device_train_batch_size=len(rows), use_cpu=True,
                         bf16=False, report_to=[])
    trainer = trl.DPOTrainer(model, reference, args, train_dataset=Dataset.from_list(rows),
                             processing_class=transformers.AutoTokenizer.from_pretrained(folder))
    wanted = trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))

    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    train, _ = preferences.create_datasets("chat", str(tmp_path / "chat.jsonl"), folder, 400, None, "drop", 300)
    torch.set_default_dtype(torch.float64)
    try:
        ours = [gpt.GPT(llama.size(str(tmp_path / "0")), train.vocabulary) for _ in both]
        for number, each in enumerate(ours):
            llama.load_weights(each, str(tmp_path / str(number)))
        train.measure(preferences.Margins(ours[1], 0.05), 2, torch.device("cpu"))
        margins = preferences.Margins(ours[0], 0.05)(*train.__getitems__(range(len(train))))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(train) == len(rows) and wanted > 0.01
    loss = preferences.sum_loss(margins).item() / len(rows)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)  # in float32 there
