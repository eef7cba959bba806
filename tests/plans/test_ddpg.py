"""The agent: it finds what random plans do not, and the same seed finds the same."""

import random
import statistics
from collections.abc import Callable

import pytest
import torch

from dkm.plans.ddpg import LAST_NOISE, WARM_UP, Agent

LAYERS, EPISODES = 6, 60
FEATURES = torch.eye(LAYERS)
BEST = [0.1, 0.9, 0.3, 0.9, 0.5, 0.1]  # the actions that the toy problem wants


def reward_of(actions: list[float]) -> float:
    return -sum((action - best) ** 2 for action, best in zip(actions, BEST, strict=True))


def rewards_of(
    propose: Callable[[], list[float]], learn: Callable[[list[float], float], None], episodes: int = EPISODES
) -> list[float]:
    rewards = []
    for _ in range(episodes):
        actions = propose()
        rewards.append(reward_of(actions))
        learn(actions, rewards[-1])
    return rewards


def trained(seed: int, episodes: int = EPISODES) -> list[float]:
    """The rewards of the first episodes."""
    agent = Agent(FEATURES, EPISODES, seed)
    return rewards_of(agent.propose, agent.learn, episodes)


def by_chance(seed: int) -> list[float]:
    draw = random.Random(seed)
    return rewards_of(lambda: [draw.random() for _ in range(LAYERS)], lambda actions, reward: None)


def test_it_is_better_than_chance_on_a_problem_with_a_known_answer():
    """A uniform action is (a - best)^2 from the best, 1/12 + (1/2 - best)^2 on average; the best reward is 0."""
    expected = -sum(1 / 12 + (best - 0.5) ** 2 for best in BEST)
    rewards = trained(0)
    assert statistics.mean(by_chance(0)) == pytest.approx(expected, abs=0.2)
    assert statistics.mean(rewards[-10:]) > 0.5 * expected


def test_the_same_seed_proposes_the_same():
    torch.manual_seed(5)
    first = trained(1, 12)
    state = torch.random.get_rng_state()
    again = trained(1, 12)
    assert first == again != trained(2, 12)
    assert torch.equal(torch.random.get_rng_state(), state)  # and what others draw does not change


def test_it_begins_at_random_and_ends_without_noise():
    agent = Agent(FEATURES, EPISODES, 0)
    noisy: list[float] = []
    for _ in range(EPISODES):
        actions = agent.propose()
        assert all(0 <= action <= 1 for action in actions)
        states = torch.cat([FEATURES, torch.tensor([0.0, *actions[:-1]])[:, None]], 1)
        with torch.no_grad():
            plain = agent.actor(states)[:, 0]
        noisy.append(float((torch.tensor(actions) - plain).abs().max()))
        agent.learn(actions, reward_of(actions))
    assert max(noisy[: int(WARM_UP * EPISODES)]) > 0.3
    assert noisy[-1] < 5 * LAST_NOISE  # ten draws, none of them 5 standard deviations away


@pytest.mark.parametrize("rewards", [[0.0] * 8, [1e9, -1e9] * 4, [-1e-9, 0.0] * 4])
def test_rewards_of_any_size(rewards: list[float]):
    agent = Agent(FEATURES[:2, :2], len(rewards), 0)
    for reward in rewards:
        actions = agent.propose()
        assert all(0 <= action <= 1 for action in actions)
        agent.learn(actions, reward)
    assert all(parameter.isfinite().all() for parameter in agent.actor.parameters())
