"""Records of conversations, in the format of a run's files, with chosen texts."""

from typing import Any


def conversation(
    said: str = "I compute.", argument: str = "12 +\n3", replied: str = "15", name: str = "calculate"
) -> dict[str, Any]:
    """Entries of a rollout or a held-out answer: two turns of the model, of which the first calls a tool."""
    call = {"type": "function", "id": "000000000", "function": {"name": name, "arguments": {"expression": argument}}}
    messages = [
        {"role": "assistant", "content": said, "tool_calls": [call], "unread_calls": [f"{argument}}}"]},
        {"role": "tool", "name": name, "tool_call_id": "000000000", "content": replied},
        {"role": "assistant", "content": f"{said} again"},
    ]
    text = f"{said}\n{name}(expression={argument!r})\n[tool] {replied}\n{said} again"
    return {"text": text, "observation": "Begin.", "messages": messages, "turn_rewards": [0.25, 0.5]}
