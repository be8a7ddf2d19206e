"""Train on one's own reward: sort four digits.

    cd examples
    python own_reward.py > tasks.jsonl      one task in a line
    holdfast run own_reward.toml

with this in own_reward.toml:

    [environment]
    name = "own_reward:reward"

    [environment.options]
    tasks = "tasks.jsonl"
    max_tokens = 4
"""

import itertools
import json


def reward(answer: str, completion: str) -> float:
    """The share of places that are right. Ask for `prompt` too, if you need it."""
    right = sum(map(str.__eq__, completion, answer))
    return right / max(len(completion), len(answer))


if __name__ == "__main__":
    for digits in itertools.product("0123456789", repeat=4):
        print(json.dumps({"prompt": "".join(digits) + "<", "answer": "".join(sorted(digits))}))
