import lightning as L
from torch.utils.data import DataLoader

BATCH_SIZE = 32


def main() -> None:
    trainer = L.Trainer(
        max_epochs=10,
        accumulate_grad_batches=1,
        precision="32-true",
        devices=2,
    )
    trainer.fit(None, DataLoader(range(10), shuffle=True, num_workers=4))


if __name__ == "__main__":
    main()
