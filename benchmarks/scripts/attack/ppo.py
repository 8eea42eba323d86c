# PPO in one file on a small grid world with pixel observations, written in numpy.
import argparse
import os
import time
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter


class GridWorld:
    """Find the goal, avoid the holes. The observation is a picture of 3 planes, upscaled."""

    moves = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])

    def __init__(self, size=8, scale=4, seed=0):
        self.size, self.scale = size, scale
        self.rng = np.random.default_rng(seed)
        self.observation_shape = (3, size * scale, size * scale)
        self.num_actions = 4

    def reset(self):
        cells = self.rng.permutation(self.size * self.size)[: 2 + self.size // 2]
        pos = np.stack([cells // self.size, cells % self.size], 1)
        self.agent, self.goal, self.holes = pos[0], pos[1], pos[2:]
        self.t = 0
        return self.observe()

    def observe(self):
        planes = np.zeros((3, self.size, self.size), dtype=np.float32)
        planes[0][tuple(self.agent)] = 1
        planes[1][tuple(self.goal)] = 1
        planes[2][tuple(self.holes.T)] = 1
        return planes.repeat(self.scale, 1).repeat(self.scale, 2)

    def step(self, action):
        self.agent = (self.agent + self.moves[action]).clip(0, self.size - 1)
        self.t += 1
        if (self.agent == self.goal).all():
            return self.observe(), 1.0, True
        if (self.agent == self.holes).all(1).any():
            return self.observe(), -1.0, True
        return self.observe(), -0.01, self.t >= 40


def layer_init(layer, std=np.sqrt(2), bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self, env, hidden):
        super().__init__()
        self.trunk = nn.Sequential(
            layer_init(nn.Conv2d(3, 32, 4, stride=2)), nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)), nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            n = self.trunk(torch.zeros(1, *env.observation_shape)).shape[1]
        self.fc = nn.Sequential(layer_init(nn.Linear(n, hidden)), nn.ReLU())
        self.actor = layer_init(nn.Linear(hidden, env.num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(hidden, 1), std=1)

    def get_value(self, x):
        return self.critic(self.fc(self.trunk(x)))

    def get_action_and_value(self, x, action=None):
        h = self.fc(self.trunk(x))
        dist = Categorical(logits=self.actor(h))
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action), dist.entropy(), self.critic(h)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=1536)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=64)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--update-epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2.5e-4)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--clip-coef", type=float, default=0.1)
    parser.add_argument("--ent-coef", type=float, default=0.01)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--target-kl", type=float, default=0.02)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches

    run_name = f"gridworld__{args.seed}__{int(time.time())}"
    writer = SummaryWriter(os.path.join(args.out, run_name))
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")

    envs = [GridWorld(seed=args.seed + i) for i in range(args.num_envs)]
    agent = Agent(envs[0], args.hidden).to(device)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    # storage
    obs = torch.zeros((args.num_steps, args.num_envs) + envs[0].observation_shape).to(device)
    actions = torch.zeros((args.num_steps, args.num_envs), dtype=torch.long).to(device)
    logprobs, rewards, dones, values = (torch.zeros((args.num_steps, args.num_envs)).to(device) for _ in range(4))

    returns_seen = deque(maxlen=50)
    episode_return = np.zeros(args.num_envs)
    global_step = 0
    start = time.time()
    next_obs = torch.tensor(np.stack([e.reset() for e in envs]), device=device)
    next_done = torch.zeros(args.num_envs, device=device)
    num_updates = args.total_timesteps // batch_size

    for update in range(1, num_updates + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / num_updates) * args.learning_rate

        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step] = next_obs
            dones[step] = next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
            actions[step] = action
            logprobs[step] = logprob

            stacked, reward, done = [], np.zeros(args.num_envs), np.zeros(args.num_envs)
            for i, a in enumerate(action.cpu().numpy()):
                o, reward[i], d = envs[i].step(a)
                episode_return[i] += reward[i]
                if d:
                    returns_seen.append(episode_return[i])
                    episode_return[i] = 0
                    o = envs[i].reset()
                done[i] = d
                stacked.append(o)
            rewards[step] = torch.tensor(reward).to(device).view(-1)
            next_obs, next_done = torch.Tensor(np.stack(stacked)).to(device), torch.Tensor(done).to(device)

        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards).to(device)
            lastgaelam = 0
            for t in reversed(range(args.num_steps)):
                if t == args.num_steps - 1:
                    alive, following = 1.0 - next_done, next_value
                else:
                    alive, following = 1.0 - dones[t + 1], values[t + 1]
                delta = rewards[t] + args.gamma * following * alive - values[t]
                advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * alive * lastgaelam
            returns = advantages + values

        b_obs = obs.reshape((-1,) + envs[0].observation_shape)
        b_logprobs, b_actions = logprobs.reshape(-1), actions.reshape(-1)
        b_advantages, b_returns, b_values = advantages.reshape(-1), returns.reshape(-1), values.reshape(-1)

        b_inds = np.arange(batch_size)
        clipfracs = []
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for s in range(0, batch_size, minibatch_size):
                mb = b_inds[s : s + minibatch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
                logratio = newlogprob - b_logprobs[mb]
                ratio = logratio.exp()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfracs += [((ratio - 1.0).abs() > args.clip_coef).float().mean().item()]
                adv = b_advantages[mb]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
                newvalue = newvalue.view(-1)
                v_clipped = b_values[mb] + (newvalue - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                v_loss = 0.5 * torch.max((newvalue - b_returns[mb]) ** 2, (v_clipped - b_returns[mb]) ** 2).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + v_loss * args.vf_coef

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        y_pred, y_true = b_values.cpu().numpy(), b_returns.cpu().numpy()
        var_y = np.var(y_true)
        explained_var = np.nan if var_y == 0 else 1 - np.var(y_true - y_pred) / var_y
        mean_return = np.mean(returns_seen) if returns_seen else float("nan")
        writer.add_scalar("losses/value_loss", v_loss.item(), global_step)
        writer.add_scalar("losses/policy_loss", pg_loss.item(), global_step)
        writer.add_scalar("losses/approx_kl", approx_kl.item(), global_step)
        writer.add_scalar("losses/explained_variance", explained_var, global_step)
        writer.add_scalar("charts/SPS", int(global_step / (time.time() - start)), global_step)
        print(f"update {update} steps {global_step} return {mean_return:.3f} kl {approx_kl.item():.4f} clip {np.mean(clipfracs):.3f}")

    torch.save(agent.state_dict(), os.path.join(args.out, run_name, "agent.pt"))
    writer.close()
