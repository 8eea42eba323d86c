"""PPO: rollouts fill a buffer, several updates use it, then it is cleared."""

import torch
from torch import nn


class Rollouts:
    def __init__(self):
        self.states, self.actions, self.log_probs, self.rewards = [], [], [], []

    def clear(self):
        for rows in (self.states, self.actions, self.log_probs, self.rewards):
            rows.clear()


def main():
    policy = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 6))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    rollouts, returns = Rollouts(), []
    for _ in range(16):
        state = torch.zeros(16, 256)
        for _ in range(48):
            with torch.no_grad():
                choice = torch.distributions.Categorical(logits=policy(state))
                action = choice.sample()
            rollouts.states.append(state)
            rollouts.actions.append(action)
            rollouts.log_probs.append(choice.log_prob(action))
            rollouts.rewards.append(torch.randn(16))
            state = 0.9 * state + 0.1 * torch.randn(16, 256)
        states, actions = torch.cat(rollouts.states), torch.cat(rollouts.actions)
        old, reward = torch.cat(rollouts.log_probs), torch.cat(rollouts.rewards)
        for _ in range(4):
            for index in torch.randperm(len(states)).split(192):
                choice = torch.distributions.Categorical(logits=policy(states[index]))
                ratio = (choice.log_prob(actions[index]) - old[index]).exp()
                gain = torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * reward[index]
                optimizer.zero_grad()
                (-gain.mean()).backward()
                optimizer.step()
        returns.append(reward.mean().item())
        rollouts.clear()


main()
