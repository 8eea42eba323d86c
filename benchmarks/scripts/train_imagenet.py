import argparse
import os
import random
import shutil
import time
from enum import Enum

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description='Image classification on a folder of images')
parser.add_argument('data', metavar='DIR', nargs='?', default='data/images', help='folder with train/ and val/')
parser.add_argument('-a', '--arch', default='resnet18', choices=['resnet10', 'resnet18', 'resnet34'])
parser.add_argument('-j', '--workers', default=2, type=int, metavar='N')
parser.add_argument('--epochs', default=2, type=int, metavar='N')
parser.add_argument('--start-epoch', default=0, type=int, metavar='N')
parser.add_argument('-b', '--batch-size', default=32, type=int, metavar='N')
parser.add_argument('--image-size', default=64, type=int)
parser.add_argument('--lr', default=0.02, type=float, dest='lr')
parser.add_argument('--momentum', default=0.9, type=float)
parser.add_argument('--wd', '--weight-decay', default=1e-4, type=float, dest='weight_decay')
parser.add_argument('-p', '--print-freq', default=2, type=int)
parser.add_argument('--steps-per-epoch', default=6, type=int, help='0 means a whole epoch')
parser.add_argument('--resume', default='', type=str, metavar='PATH')
parser.add_argument('-e', '--evaluate', action='store_true', help='only evaluate')
parser.add_argument('--no-amp', action='store_true')
parser.add_argument('--channels-last', action='store_true')
parser.add_argument('--seed', default=None, type=int)
parser.add_argument('--out', default='out/imagenet', type=str)

best_acc1 = 0


def make_images(root, size=72, classes=8):
    """Noisy coloured gratings, one orientation and hue per class."""
    rng = np.random.RandomState(0)
    yy, xx = np.mgrid[:size, :size] / size
    for split, count in (('train', 32), ('val', 12)):
        for c in range(classes):
            folder = os.path.join(root, split, f'n{c:04d}')
            os.makedirs(folder, exist_ok=True)
            angle = np.pi * c / classes
            for i in range(count):
                wave = np.sin(20 * (np.cos(angle) * xx + np.sin(angle) * yy) + rng.rand() * 6)
                colour = 0.5 + 0.4 * np.sin(c + np.arange(3) * 2)
                img = 127 + 90 * wave[..., None] * colour + rng.randn(size, size, 3) * 25
                Image.fromarray(img.clip(0, 255).astype(np.uint8)).save(os.path.join(folder, f'{i}.png'))


class Folder(Dataset):
    mean = np.array([0.485, 0.456, 0.406], dtype=np.float32)
    std = np.array([0.229, 0.224, 0.225], dtype=np.float32)

    def __init__(self, root, size, train):
        self.classes = sorted(os.listdir(root))
        self.samples = [(os.path.join(root, c, f), i) for i, c in enumerate(self.classes)
                        for f in sorted(os.listdir(os.path.join(root, c)))]
        self.size = size
        self.train = train

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, target = self.samples[index]
        img = Image.open(path).convert('RGB')
        if self.train:
            w, h = img.size
            scale = random.uniform(0.6, 1.0)
            cw, ch = int(w * scale), int(h * scale)
            x, y = random.randint(0, w - cw), random.randint(0, h - ch)
            img = img.crop((x, y, x + cw, y + ch))
        img = img.resize((self.size, self.size), Image.BILINEAR)
        arr = (np.asarray(img, dtype=np.float32) / 255 - self.mean) / self.std
        if self.train and random.random() < 0.5:
            arr = arr[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(arr.transpose(2, 0, 1))), target


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or inplanes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
                                  nn.MaxPool2d(3, 2, 1))
        planes, stages = 64, []
        for i, n in enumerate(layers):
            width = 64 * 2 ** i
            for j in range(n):
                stages.append(BasicBlock(planes, width, stride=2 if i > 0 and j == 0 else 1))
                planes = width
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(planes, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode='fan_out', nonlinearity='relu')

    def forward(self, x):
        x = self.stages(self.stem(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


ARCHS = {'resnet10': [1, 1, 1, 1], 'resnet18': [2, 2, 2, 2], 'resnet34': [3, 4, 6, 3]}


def main():
    global best_acc1
    args = parser.parse_args()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
        cudnn.deterministic = True
    else:
        cudnn.benchmark = True

    if not os.path.isdir(os.path.join(args.data, 'train')):
        print(f'=> no images in {args.data}, making some')
        make_images(args.data)
    os.makedirs(args.out, exist_ok=True)

    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    train_set = Folder(os.path.join(args.data, 'train'), args.image_size, train=True)
    val_set = Folder(os.path.join(args.data, 'val'), args.image_size, train=False)
    pin = device.type == 'cuda'
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=args.workers,
                              pin_memory=pin, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=2 * args.batch_size, num_workers=args.workers, pin_memory=pin)

    print(f"=> creating model '{args.arch}'")
    model = ResNet(ARCHS[args.arch], len(train_set.classes)).to(device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)

    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay,
                                nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    use_amp = device.type == 'cuda' and not args.no_amp
    scaler = torch.amp.GradScaler('cuda', enabled=use_amp)

    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        args.start_epoch = checkpoint['epoch']
        best_acc1 = checkpoint['best_acc1']
        model.load_state_dict(checkpoint['state_dict'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        scheduler.load_state_dict(checkpoint['scheduler'])
        scaler.load_state_dict(checkpoint['scaler'])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")

    if args.evaluate:
        validate(val_loader, model, criterion, device, use_amp, args)
        return

    for epoch in range(args.start_epoch, args.epochs):
        train(train_loader, model, criterion, optimizer, scaler, epoch, device, use_amp, args)
        acc1 = validate(val_loader, model, criterion, device, use_amp, args)
        scheduler.step()

        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        save_checkpoint({
            'epoch': epoch + 1,
            'arch': args.arch,
            'state_dict': model.state_dict(),
            'best_acc1': best_acc1,
            'optimizer': optimizer.state_dict(),
            'scheduler': scheduler.state_dict(),
            'scaler': scaler.state_dict(),
        }, is_best, args.out)


def train(loader, model, criterion, optimizer, scaler, epoch, device, use_amp, args):
    batch_time = AverageMeter('Time', ':6.3f')
    data_time = AverageMeter('Data', ':6.3f')
    losses = AverageMeter('Loss', ':.4e')
    top1 = AverageMeter('Acc@1', ':6.2f')
    top5 = AverageMeter('Acc@5', ':6.2f')
    progress = ProgressMeter(len(loader), [batch_time, data_time, losses, top1, top5], prefix=f'Epoch: [{epoch}]')

    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        if args.steps_per_epoch and i >= args.steps_per_epoch:
            break
        data_time.update(time.time() - end)
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        if args.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)

        with torch.autocast(device.type, dtype=torch.float16, enabled=use_amp):
            output = model(images)
            loss = criterion(output, target)

        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        top5.update(acc5[0], images.size(0))

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i + 1)


def validate(loader, model, criterion, device, use_amp, args):
    batch_time = AverageMeter('Time', ':6.3f', Summary.NONE)
    losses = AverageMeter('Loss', ':.4e', Summary.NONE)
    top1 = AverageMeter('Acc@1', ':6.2f', Summary.AVERAGE)
    top5 = AverageMeter('Acc@5', ':6.2f', Summary.AVERAGE)
    progress = ProgressMeter(len(loader), [batch_time, losses, top1, top5], prefix='Test: ')

    model.eval()
    with torch.no_grad():
        end = time.time()
        for i, (images, target) in enumerate(loader):
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            if args.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast(device.type, dtype=torch.float16, enabled=use_amp):
                output = model(images)
                loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0], images.size(0))
            top5.update(acc5[0], images.size(0))
            batch_time.update(time.time() - end)
            end = time.time()
            if i % args.print_freq == 0:
                progress.display(i + 1)
    progress.display_summary()
    return top1.avg


def save_checkpoint(state, is_best, folder):
    filename = os.path.join(folder, 'checkpoint.pth.tar')
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(folder, 'model_best.pth.tar'))


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    """Keeps the last value and the mean of all."""

    def __init__(self, name, fmt=':f', summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ('{name} {val' + self.fmt + '} ({avg' + self.fmt + '})').format(
            name=self.name, val=float(self.val), avg=float(self.avg))

    def summary(self):
        return f'{self.name} {float(self.avg):.3f}' if self.summary_type is Summary.AVERAGE else ''


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=''):
        self.width = len(str(num_batches))
        self.num_batches, self.meters, self.prefix = num_batches, meters, prefix

    def display(self, batch):
        print('\t'.join([f'{self.prefix}[{batch:{self.width}d}/{self.num_batches}]', *map(str, self.meters)]))

    def display_summary(self):
        print(' *', *(m.summary() for m in self.meters if m.summary()))


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        hits = pred.eq(target.view(-1, 1)).t()
        return [hits[:k].reshape(-1).float().sum(0, keepdim=True) * (100.0 / target.size(0)) for k in topk]


if __name__ == '__main__':
    main()
