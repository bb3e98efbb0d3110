"""What a stream of events adds up to, for each form of the API that streams."""

from __future__ import annotations

import json


def events_of(text):
    """Return the JSON objects of a stream of OpenAI's, which [DONE] must end."""
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]", blocks[-1][:300]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) for block in blocks[:-1]]


def named_events_of(text):
    """Return the JSON objects of a stream whose events have names."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        found.append(content)
    return found


def completion_of(events):
    """Return what a stream of /v1/completions adds up to, in the form of a whole answer."""
    choices, usage, ended = {}, None, set()
    heads = {(e["id"], e["object"], e["created"], e["model"]) for e in events}
    assert len(heads) == 1, "every event has the same head"
    for event in events:
        usage = event.get("usage") or usage
        for new in event["choices"]:
            index = new["index"]
            assert index not in ended, "nothing follows a finish_reason"
            if index not in choices:
                choices[index] = new
            else:
                _add_completion(choices[index], new)
            if new["finish_reason"] is not None:
                ended.add(index)
    assert ended == set(choices)
    answer = {k: events[0][k] for k in ("id", "object", "created", "model")}
    return {**answer, "choices": [choices[i] for i in sorted(choices)], "usage": usage}


def _add_completion(old, new):
    old["text"] += new["text"]
    for name in ("token_ids",):
        if name in new:
            old[name] = old[name] + new[name]
    assert "prompt_token_ids" not in new
    assert "prompt_logprobs" not in new
    if new["logprobs"] is not None:
        for name, values in new["logprobs"].items():
            if values is not None:
                old["logprobs"][name] = old["logprobs"][name] + values
    for name in ("finish_reason", "stop_reason"):
        if name in new:
            old[name] = new[name]


def chat_of(events):
    """Return what a stream of /v1/chat/completions adds up to, in the form of a whole answer."""
    choices, usage, ended = {}, None, set()
    assert len({(e["id"], e["object"], e["created"], e["model"]) for e in events}) == 1
    for event in events:
        usage = event.get("usage") or usage
        for new in event["choices"]:
            index, delta = new["index"], new["delta"]
            assert index not in ended, "nothing follows a finish_reason"
            if index not in choices:
                assert delta.get("role") == "assistant", "the first event says who speaks"
                choices[index] = {"index": index, "message": {}, "logprobs": None}
            else:
                assert "role" not in delta
            choice = choices[index]
            _add_delta(choice["message"], delta)
            if new.get("logprobs") is not None:
                old = choice["logprobs"] or {"content": [], "refusal": None}
                old["content"] = old["content"] + new["logprobs"]["content"]
                choice["logprobs"] = old
            if "token_ids" in new:
                choice["token_ids"] = choice.get("token_ids", []) + new["token_ids"]
            if new["finish_reason"] is not None:
                ended.add(index)
                choice["finish_reason"] = new["finish_reason"]
                choice["stop_reason"] = new["stop_reason"]
    assert ended == set(choices)
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


def _add_delta(message, delta):
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] == len(calls):
                    assert part["id"]
                    assert part["type"] == "function"
                    calls.append({"id": part["id"], "type": "function", "function": {}})
                    calls[-1]["function"]["name"] = part["function"]["name"]
                    calls[-1]["function"]["arguments"] = ""
                else:
                    assert part["index"] == len(calls) - 1, "calls come one after another"
                    assert "id" not in part
                    assert "name" not in part["function"]
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        elif isinstance(value, str) and name in message and name != "role":
            message[name] += value
        else:
            message[name] = value


def message_of(events):
    """Return what a stream of /v1/messages adds up to, in the form of a whole answer."""
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    message, partial, open_block = events[0]["message"], {}, None
    for event in events[1:-1]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None
            open_block = event["index"]
            assert open_block == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert event["index"] == open_block
            delta = event["delta"]
            block = message["content"][open_block]
            if delta["type"] == "input_json_delta":
                partial[open_block] = partial.get(open_block, "") + delta["partial_json"]
            else:
                name = {"text_delta": "text", "thinking_delta": "thinking"}[delta["type"]]
                block[name] += delta[name]
        elif kind == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
        else:
            assert kind == "message_delta"
            assert open_block is None
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for index, text in partial.items():
        message["content"][index]["partial"] = text
    return message
