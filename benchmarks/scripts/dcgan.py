from __future__ import print_function

import argparse
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.parallel
import torch.optim as optim
import torch.utils.data
from PIL import Image

parser = argparse.ArgumentParser()
parser.add_argument('--dataroot', default='data/faces', help='folder with the images (npy)')
parser.add_argument('--workers', type=int, help='number of data loading workers', default=0)
parser.add_argument('--batchSize', type=int, default=32, help='input batch size')
parser.add_argument('--imageSize', type=int, default=64, help='height and width of the input images')
parser.add_argument('--nz', type=int, default=100, help='size of the latent vector')
parser.add_argument('--ngf', type=int, default=32)
parser.add_argument('--ndf', type=int, default=32)
parser.add_argument('--niter', type=int, default=1, help='number of epochs')
parser.add_argument('--lr', type=float, default=0.0002)
parser.add_argument('--beta1', type=float, default=0.5, help='beta1 for adam')
parser.add_argument('--dry-run', action='store_true', help='a single training cycle')
parser.add_argument('--ngpu', type=int, default=1)
parser.add_argument('--netG', default='', help='path to netG (to continue training)')
parser.add_argument('--netD', default='', help='path to netD (to continue training)')
parser.add_argument('--outf', default='out/dcgan', help='folder for images and checkpoints')
parser.add_argument('--manualSeed', type=int, help='manual seed')
opt = parser.parse_args()
print(opt)

os.makedirs(opt.outf, exist_ok=True)

if opt.manualSeed is None:
    opt.manualSeed = random.randint(1, 10000)
print("Random Seed: ", opt.manualSeed)
random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

images_file = os.path.join(opt.dataroot, 'images%d.npy' % opt.imageSize)
if not os.path.exists(images_file):
    # round "faces" with two eyes on a plain ground
    os.makedirs(opt.dataroot, exist_ok=True)
    rng = np.random.RandomState(7)
    y, x = np.mgrid[-1:1:opt.imageSize * 1j, -1:1:opt.imageSize * 1j]
    faces = np.zeros((640, 3, opt.imageSize, opt.imageSize), dtype=np.uint8)
    for k in range(len(faces)):
        img = np.ones((3, *x.shape)) * rng.rand(3, 1, 1)
        r, dx, dy = rng.uniform(0.5, 0.8), rng.uniform(-0.1, 0.1), rng.uniform(-0.1, 0.1)
        img[:, (x - dx) ** 2 + (y - dy) ** 2 < r * r] = rng.rand(3, 1)
        for side in (-1, 1):
            img[:, (x - dx - side * r / 3) ** 2 + (y - dy + r / 4) ** 2 < 0.01] = 0
        faces[k] = (img * 255).astype(np.uint8)
    np.save(images_file, faces)


class Faces(torch.utils.data.Dataset):
    def __init__(self, path):
        self.images = np.load(path, mmap_mode='r')

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return torch.from_numpy(self.images[index].astype(np.float32)) / 127.5 - 1.0, 0


dataset = Faces(images_file)
dataloader = torch.utils.data.DataLoader(dataset, batch_size=opt.batchSize, shuffle=True, num_workers=int(opt.workers))
nc = 3
nz = int(opt.nz)


def weights_init(m):
    name = type(m).__name__
    if 'Conv' in name:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif 'BatchNorm' in name:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def up(cin, cout, *args):
    return [nn.ConvTranspose2d(cin, cout, *args, bias=False), nn.BatchNorm2d(cout), nn.ReLU(True)]


def down(cin, cout):
    return [nn.Conv2d(cin, cout, 4, 2, 1, bias=False), nn.BatchNorm2d(cout), nn.LeakyReLU(0.2, inplace=True)]


class Generator(nn.Module):
    def __init__(self, ngpu, ngf):
        super(Generator, self).__init__()
        self.ngpu = ngpu
        self.main = nn.Sequential(
            *up(nz, ngf * 8, 4, 1, 0),
            *up(ngf * 8, ngf * 4, 4, 2, 1),
            *up(ngf * 4, ngf * 2, 4, 2, 1),
            *up(ngf * 2, ngf, 4, 2, 1),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        if z.is_cuda and self.ngpu > 1:
            return nn.parallel.data_parallel(self.main, z, range(self.ngpu))
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, ngpu, ndf):
        super(Discriminator, self).__init__()
        self.ngpu = ngpu
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            *down(ndf, ndf * 2),
            *down(ndf * 2, ndf * 4),
            *down(ndf * 4, ndf * 8),
            nn.Conv2d(ndf * 8, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        if x.is_cuda and self.ngpu > 1:
            out = nn.parallel.data_parallel(self.main, x, range(self.ngpu))
        else:
            out = self.main(x)
        return out.view(-1, 1).squeeze(1)


netG = Generator(opt.ngpu, opt.ngf).to(device)
netG.apply(weights_init)
if opt.netG != '':
    netG.load_state_dict(torch.load(opt.netG))
print(netG)

netD = Discriminator(opt.ngpu, opt.ndf).to(device)
netD.apply(weights_init)
if opt.netD != '':
    netD.load_state_dict(torch.load(opt.netD))
print(netD)

criterion = nn.BCELoss()
fixed_noise = torch.randn(16, nz, 1, 1, device=device)
REAL, FAKE = 1.0, 0.0

optD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

if opt.dry_run:
    opt.niter = 1


def save_image(t, path):
    a = ((t + 1) * 127.5).clamp(0, 255).byte().cpu().numpy()
    n, c, h, w = a.shape
    side = int(n ** 0.5)
    grid = a[:side * side].reshape(side, side, c, h, w).transpose(0, 3, 1, 4, 2).reshape(side * h, side * w, c)
    Image.fromarray(grid).save(path)


for epoch in range(opt.niter):
    for i, (real, _) in enumerate(dataloader):
        # the discriminator: log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = real.to(device)
        n = real.size(0)
        label = torch.full((n,), REAL, dtype=real.dtype, device=device)
        out = netD(real)
        lossD_real = criterion(out, label)
        lossD_real.backward()
        D_x = out.mean().item()

        z = torch.randn(n, nz, 1, 1, device=device)
        fake = netG(z)
        label.fill_(FAKE)
        out = netD(fake.detach())
        lossD_fake = criterion(out, label)
        lossD_fake.backward()
        D_G_z1 = out.mean().item()
        lossD = lossD_real + lossD_fake
        optD.step()

        # the generator: log(D(G(z)))
        netG.zero_grad()
        label.fill_(REAL)
        out = netD(fake)
        lossG = criterion(out, label)
        lossG.backward()
        D_G_z2 = out.mean().item()
        optG.step()

        print('[%d/%d][%d/%d] Loss_D: %.4f Loss_G: %.4f D(x): %.4f D(G(z)): %.4f / %.4f'
              % (epoch, opt.niter, i, len(dataloader), lossD.item(), lossG.item(), D_x, D_G_z1, D_G_z2))
        if i % 10 == 0:
            save_image(real, '%s/real_samples.png' % opt.outf)
            sample = netG(fixed_noise)
            save_image(sample.detach(), '%s/fake_samples_epoch_%03d.png' % (opt.outf, epoch))

        if opt.dry_run:
            break
    torch.save(netG.state_dict(), '%s/netG_epoch_%d.pth' % (opt.outf, epoch))
    torch.save(netD.state_dict(), '%s/netD_epoch_%d.pth' % (opt.outf, epoch))
