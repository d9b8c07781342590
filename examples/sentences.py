"""Prompts that ask for a sentence of a given length, and their verifier: the task of docs/iterative.md.

    .venv/bin/python examples/sentences.py                   writes sentences.jsonl

A recipe names the verifier as examples/sentences.py:right.
"""

import json

TOPICS = """
apple bridge camera candle castle chair cheese cloud coffee desert doctor dragon eagle engine farmer feather flower
forest garden guitar hammer harbor horse island jacket kitchen ladder lemon library lion market mirror monkey moon
mountain museum ocean orange painter paper pencil penguin piano pilot planet pocket potato queen rabbit rain river
robot rocket sailor salt school shadow sheep ship shoe singer snow soldier soup spider spoon spring star station
stone storm student sugar summer sun table tailor teacher temple theater tiger tomato tower train tree turtle
umbrella valley village violin volcano wagon wallet water whale wheel wind window winter wolf wood zebra actor ant
artist baker ball basket beach bear bee bell bird boat book bottle box bread brush bus butter cake carpet cat clock
coat coin corn cow crown cup dance dog door drum duck ear egg elephant farm fish flag flute fox frog glass goat gold
grass hat hill honey house ice juice key king kite lake lamp leaf letter map milk moth nest nurse onion owl park
pear pig plane rice ring road rope rose
"""


def right(completions: list[list[dict[str, str]]], **columns: object) -> list[float]:
    """1 for one sentence of five to seven words that ends with a full stop, else 0."""
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [float(5 <= len(text.split()) <= 7 and text.endswith(".") and text.count(".") == 1) for text in texts]


if __name__ == "__main__":
    with open("sentences.jsonl", "w") as file:
        for topic in TOPICS.split():
            prompt = f"Write one sentence of five to seven words about this: {topic}."
            file.write(json.dumps({"prompt": [{"role": "user", "content": prompt}]}) + "\n")
