"""The shipped environment of several turns."""

from holdfast.rollout.environments import Score, Task, load_environment


def test_halving_wins() -> None:
    """Whoever halves what is left finds every number in time; the earlier, the better."""
    guess = load_environment("guess", {})
    for number in range(100):
        task, turns, low, high = Task("00 to 99?", f"{number:02}"), list[str](), 0, 99
        while True:
            turns.append(f"{(low + high) // 2:02}")
            said = guess.reply(task, turns)
            if said is None:
                break
            if said == " higher?":
                low = int(turns[-1]) + 1
            else:
                assert said == " lower?"
                high = int(turns[-1]) - 1
        assert len(turns) <= guess.max_turns
        assert guess.score(task, turns, []) == Score(1 - (len(turns) - 1) / 7, exact=True)


def test_nonsense() -> None:
    """What is no number is asked for again and worth nothing."""
    guess = load_environment("guess", {})
    for said in ("", "x", "7", "٧٧", "123"):
        assert guess.reply(Task("", "50"), [said]) == " two digits?"
        assert guess.score(Task("", "50"), [said], []) == Score(0.0)
