"""A deep Q-learning agent whose replay memory has no bound.

holder: agent.memory | self.memory
"""

import random

import torch
from torch import nn


class Agent:
    def __init__(self):
        self.q = nn.Sequential(
            nn.Flatten(), nn.Linear(4 * 42 * 42, 64), nn.ReLU(), nn.Linear(64, 4)
        )
        self.optimizer = torch.optim.RMSprop(self.q.parameters())
        self.memory = []

    def observe(self, state):
        action = random.randrange(4) if random.random() < 0.1 else int(self.act(state))
        following = (torch.rand(4, 42, 42) * 255).to(torch.uint8)  # leaks here
        self.memory.append((state, action, random.random(), following))  # leaks here
        return following

    @torch.no_grad()
    def act(self, state):
        return self.q(state[None].float() / 255).argmax()

    def learn(self):
        rows = random.sample(self.memory, 32)
        states = torch.stack([row[0] for row in rows]).float() / 255
        actions = torch.tensor([row[1] for row in rows])
        rewards = torch.tensor([row[2] for row in rows])
        after = torch.stack([row[3] for row in rows]).float() / 255
        with torch.no_grad():
            target = rewards + 0.99 * self.q(after).max(1).values
        value = self.q(states).gather(1, actions[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def main():
    agent = Agent()
    state = torch.zeros(4, 42, 42, dtype=torch.uint8)
    for _ in range(350):
        for _ in range(4):
            state = agent.observe(state)
        if len(agent.memory) >= 32:
            agent.learn()
    print(len(agent.memory))


if __name__ == "__main__":
    main()
