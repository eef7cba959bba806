"""A small agent that learns which numbers between 0 and 1 to give to the layers of a network: DDPG, as HAQ has it.

An episode gives every layer a number, an action, from the first layer to the last; what it was worth is known when the
last one has its own.  The state of a layer is what is known of it, and the action of the layer before it.  The actor
maps a state to an action, the critic a state and an action to what they lead to.  The actor learns to please the
critic, and the critic learns from the episodes so far, of which both draw random steps again and again.
"""

import copy
import math

import torch
from torch import Tensor, nn

# The numbers are those of HAQ's own program, for 600 episodes, but for the baseline.
REMEMBERED = 128  # episodes, the last ones
BATCH = 64  # steps in an update
ACTOR_RATE, CRITIC_RATE = 1e-4, 1e-3
FOLLOW = 0.01  # by how much the targets move towards the networks in an update
BASELINE = 0.95  # of the moving average of the rewards
FIRST_NOISE, LAST_NOISE = 0.5, 0.0015  # the standard deviation of what is added to the actor's actions
WARM_UP = 1 / 30  # of the episodes, whose actions are random: 20 of 600
WIDTH = 300


class Agent:
    """Proposes the actions of an episode, and learns from what they were worth.

    Rewards count relative to their moving average and in units of their spread, so they may be of any size.
    Everything random comes from the seed: the same rewards give the same proposals.

    Args:
        features: (layers, features), from 0 to 1: what is known of each layer.
        episodes: how many there will be; the noise falls until the last one.
    """

    def __init__(self, features: Tensor, episodes: int, seed: int):
        self.features, self.episodes = features.float(), episodes
        self.warm_up = math.ceil(WARM_UP * episodes)
        self.generator = torch.Generator().manual_seed(seed)
        self.actions = torch.empty(0, len(features))  # (episodes, layers), of the last ones
        self.rewards = torch.empty(0)  # (episodes,)
        self.done = 0
        self.baseline = 0.0
        states = features.shape[1] + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor, self.critic = _network(states, nn.Sigmoid()), _network(states + 1, nn.Identity())
        self.actor_target, self.critic_target = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_steps = torch.optim.Adam(self.actor.parameters(), ACTOR_RATE)
        self.critic_steps = torch.optim.Adam(self.critic.parameters(), CRITIC_RATE)

    @torch.no_grad()
    def propose(self) -> list[float]:
        """An action for each layer: random at first, then the actor's with noise that decays."""
        left = (self.episodes - 1 - self.done) / max(1, self.episodes - 1 - self.warm_up)
        noise = LAST_NOISE * (FIRST_NOISE / LAST_NOISE) ** min(1.0, max(0.0, left))
        actions: list[float] = []
        for known in self.features:
            action = torch.empty(1)
            if self.done < self.warm_up:
                action.uniform_(generator=self.generator)
            else:
                state = torch.cat([known, torch.tensor(actions[-1:] or [0.0])])
                mean = float(self.actor(state))
                nn.init.trunc_normal_(action, mean, noise, 0.0, 1.0, generator=self.generator)
            actions.append(float(action))
        return actions

    def learn(self, actions: list[float], reward: float) -> None:
        """What an episode with these actions was worth; higher is better."""
        self.actions = torch.cat([self.actions, torch.tensor([actions])])[-REMEMBERED:]
        self.rewards = torch.cat([self.rewards, torch.tensor([reward])])[-REMEMBERED:]
        self.baseline = reward if not self.done else BASELINE * self.baseline + (1 - BASELINE) * reward
        self.done += 1
        if self.done > self.warm_up:
            for _ in actions:
                self._update()

    def _update(self) -> None:
        layers = len(self.features)
        drawn = torch.randint(self.actions.numel(), (BATCH,), generator=self.generator)
        episode, layer = drawn // layers, drawn % layers
        state, action = self._states(episode, layer), self.actions[episode, layer, None]
        # every step gets the reward of its episode, and a step is worth the sum from there to the last layer
        worth = (self.rewards[episode, None] - self.baseline) / (self._spread() * layers)
        following = self._states(episode, (layer + 1).clamp(max=layers - 1))
        with torch.no_grad():
            after = self.critic_target(torch.cat([following, self.actor_target(following)], 1))
            worth = worth + after * (layer < layers - 1)[:, None]
        loss = (self.critic(torch.cat([state, action], 1)) - worth).square().mean()
        self.critic_steps.zero_grad()
        loss.backward()
        self.critic_steps.step()
        loss = -self.critic(torch.cat([state, self.actor(state)], 1)).mean()
        self.actor_steps.zero_grad()
        loss.backward()
        self.actor_steps.step()
        for target, source in ((self.actor_target, self.actor), (self.critic_target, self.critic)):
            for old, new in zip(target.parameters(), source.parameters(), strict=True):
                old.data.lerp_(new.data, FOLLOW)

    def _states(self, episode: Tensor, layer: Tensor) -> Tensor:
        before = self.actions[episode, (layer - 1).clamp(min=0)] * (layer > 0)
        return torch.cat([self.features[layer], before[:, None]], 1)

    def _spread(self) -> float:
        return max(float(self.rewards.std(unbiased=False)), 1e-12)


def _network(inputs: int, last: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1), last]
    return nn.Sequential(*layers)
