"""An adapter of tests: a shop with a tool, whose owner talks as well, and prompts of its own."""

from covey.llm.conversation.adapter import Adapter, Response, WrongEnvironment, function_schema

PRICE = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["item"],
    "additionalProperties": False,
}


class Shop(Adapter):
    """Sells cups."""

    prepared = 0

    def __init__(self, prices=(3,), score=0.5):
        self.said, self._prices, self._score, self._closed = [], prices, score, False

    @classmethod
    def prepare(cls, prices=(3,), **options):
        if not prices:
            raise WrongEnvironment("the option prices is empty")
        cls.prepared += 1

    def tool_schemas(self):
        return [function_schema("price", "Price of an item.", PRICE)]

    def rows(self):
        rows = [{"prompt": f"What does a cup of kind {kind} cost?", "kind": kind, "answer": kind} for kind in range(8)]
        return {"training": rows, "held_out": rows[:2]}

    def reset(self, kind=0, **columns):
        return f"Kind {kind}, {self.prepared} shop."

    def respond(self, message, calls):
        self.said.append(message)
        if message == "odd":
            return Response(reward=float("nan"))
        results = [f"{call['arguments']['item']}: {self._prices[0]}" for call in calls]
        return Response(results, "Anything else?" if calls else None, reward=0.25, done=message == "bye")

    def score(self):
        return self._score

    def close(self):
        self._closed = True
        self.said.append("closed")
