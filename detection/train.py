"""Train an object detector, YOLOv3, on one device: the baseline, with the order and names of ../train.py.

    python -m detection.train
    python -m detection.train --preview
    python -m detection.train --dataset coco --data-path coco --image-size 416 --model yolov3 \
        --weights darknet53.conv.74 --batch-size 32 --multi-scale

Parent: none
"""
import time

from common import checkpoint, cli, datasets, devices, errors, loading, models

from . import data, mean_ap, yolov3

import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

criterion = yolov3.loss  # yours: the loss, a sum over the boxes: batches differ in their number of boxes


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--dataset", choices=data.DATASETS, default="scenes", help="the dataset")
    parser.add_argument("--image-size", type=cli.positive_int, default=96, help="pixels, a multiple of 32")
    parser.add_argument("--multi-scale", action="store_true", help="a new image size every 10 steps")
    parser.add_argument("--preview", action="store_true", help="only save training images: preview.png")
    parser.add_argument("--data-path", default="data", help="data folder; downloads go there too")
    parser.add_argument("--model", choices=yolov3.MODELS, default="tiny", help="the network")
    parser.add_argument("--weights", metavar="PATH", help="load the matching tensors from this file")
    parser.add_argument("--freeze-layers", action="store_true", help="train only the last layers")
    parser.add_argument("--epochs", type=cli.positive_int, default=20, help="passes over the training set")
    parser.add_argument("--batch-size", type=cli.positive_int, default=16, help="samples over ALL processes")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="adamw: try --lr 0.005")
    parser.add_argument("--schedule", choices=["cosine", "step"], default="cosine", help="decay of the rate")
    parser.add_argument("--warmup-epochs", type=cli.count, default=1, help="epochs until the full rate")
    parser.add_argument("--lr", type=cli.positive, default=0.05, help="for batch size 128; scales linearly")
    parser.add_argument("--lrf", type=cli.fraction, default=0.01, help="final rate as a fraction of --lr")
    parser.add_argument("--momentum", type=cli.fraction, default=0.9, help="momentum of SGD")
    parser.add_argument("--weight-decay", type=cli.not_negative, default=1e-4, help="skips biases and norms")
    parser.add_argument("--workers", type=cli.count, help="loader processes (default: set automatically)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, xpu, mps (default: an accelerator, else cpu)")
    parser.add_argument("--deterministic", action="store_true", help="make runs bit-identical; slower")
    parser.add_argument("--seed", type=cli.count, default=0, help="for weights, order and augmentation")
    parser.add_argument("--output-dir", default="runs", help="folder for checkpoints and TensorBoard")
    parser.add_argument("--resume", metavar="PATH", help="a checkpoint, or auto: last.pt in --output-dir")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the loaded weights")
    parser.add_argument("--log-every", type=cli.positive_int, default=10, help="read the loss every N steps")
    parser.add_argument("--save-every", type=cli.count, default=0, help="also keep every Nth checkpoint")
    return parser.parse_args()


@torch.no_grad()
def evaluate(model, loader, normalize, device):
    """Return the mean loss per box and the mean average precisions, over all images."""
    model.eval()
    # mAP is not a mean over images: it ranks the detections of all images together
    rows = [torch.zeros(0, 3, device=device)]
    sums = torch.zeros(1 + model.num_classes, device=device)
    for batch in loader:
        inputs, targets = (part.to(device, non_blocking=loader.pin_memory) for part in batch)
        outputs = model(normalize(inputs))
        sums[0] += criterion(outputs, targets)
        sums[1:] += data.count_boxes(targets, model.num_classes)
        rows.append(mean_ap.match(yolov3.detect(outputs), targets))

    loss, *boxes = sums.tolist()
    loss /= max(sum(boxes), 1)
    return loss, mean_ap.average_precision(torch.cat(rows), boxes)


def start_log(args, start_epoch, headline):
    """Print the headline, log the arguments to TensorBoard, and return the writer."""
    print(headline)
    writer = SummaryWriter(args.output_dir, purge_step=start_epoch)
    writer.add_text("arguments", "\n".join(f"    {name} = {value}" for name, value in vars(args).items()))
    writer.flush()
    return writer


def main(args):
    torch.manual_seed(args.seed)
    device = devices.prepare(args.device, args.deterministic)
    folder = checkpoint.make_folder(args.output_dir, lock=not args.evaluate)

    # yours: the data; every epoch shuffles the samples again and drops its incomplete last batch
    train_set, val_set = data.create_datasets(args.dataset, args.data_path, args.image_size, args.seed)
    if args.preview:
        return data.save_preview(folder / "preview.png", train_set)
    torch.backends.cudnn.benchmark &= not args.multi_scale  # cuDNN would search again for each size
    datasets.require_samples(train_set, val_set, args.batch_size)
    local_batch_size = args.batch_size
    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_options = loading.options(args.workers, device, train_set)
    val_options = loading.options(args.workers, device, val_set)
    train_loader = DataLoader(train_set, local_batch_size, sampler=sampler, drop_last=True, **train_options)
    val_loader = DataLoader(val_set, local_batch_size, **val_options)
    normalize = datasets.Normalize(train_set).to(device)

    # yours: the model
    model = yolov3.create_model(args.model, train_set.classes, data.anchors(train_set))
    if args.weights:
        yolov3.load_weights(model, args.weights)
    if args.freeze_layers:
        models.freeze_layers(model)
    models.to_device(model, device)  # convolutions in channels-last, the fastest layout

    # yours: the optimizer; the rate grows with the batch size for SGD, and with its square root for AdamW
    groups = models.parameter_groups(model, args.weight_decay)
    if args.optimizer == "adamw":
        lr = args.lr * (args.batch_size / 128) ** 0.5
        optimizer = torch.optim.AdamW(groups, lr)
    else:
        lr = args.lr * args.batch_size / 128
        optimizer = torch.optim.SGD(groups, lr, args.momentum, nesterov=args.momentum > 0)
    factor = yolov3.schedule(args.schedule, args.epochs, args.lrf, args.warmup_epochs)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start_epoch, best_score = checkpoint.resume(args.resume, folder, state)

    if args.evaluate:
        if not args.weights and start_epoch == 1:
            raise errors.UsageError("--evaluate: no weights were loaded; pass --weights or --resume")
        val_loss, metrics = evaluate(model, val_loader, normalize, device)
        print(f"val_loss {val_loss:.4f}  {cli.show(metrics)}")
        return

    layout = f"1 process x 1 micro-batch x {local_batch_size}"
    headline = f"{device}: batch {args.batch_size} = {layout}, lr {lr:g}, {models.size(model)} parameters"
    writer = start_log(args, start_epoch, headline)

    for epoch in range(start_epoch, args.epochs + 1):  # yours: early stopping: break here, on all ranks
        # Order, augmentation and dropout depend only on (seed, epoch), so a resumed run reproduces them
        datasets.set_epoch(train_set, epoch)
        sampler.generator.manual_seed(loading.seed(args.seed) + epoch)
        torch.manual_seed(loading.seed(args.seed, epoch))

        model.train()
        loss_sum = torch.zeros((), device=device)
        start = time.perf_counter()
        bar = tqdm(train_loader, f"epoch {epoch}", leave=False, disable=None)
        for step, batch in enumerate(bar, 1):
            inputs, targets = (part.to(device, non_blocking=train_loader.pin_memory) for part in batch)
            if args.multi_scale:
                inputs, targets = data.rescale(inputs, targets, args.seed, epoch, step)
            optimizer.zero_grad()
            count = (targets[:, 1] >= 0).sum()  # of boxes, which can be zero
            loss = criterion(model(normalize(inputs)), targets) / count.clamp(min=1)
            loss.backward()
            optimizer.step()
            # yours: a scheduler that steps after every batch; clip gradients above optimizer.step()
            loss_sum += loss.detach()

            # Reading the loss waits for the device: do it only every --log-every steps
            if step % args.log_every and step < len(train_loader):
                continue
            train_loss = loss_sum.item() / step
            errors.require_finite(train_loss, f"epoch {epoch}, step {step}: the loss")
            bar.set_postfix(loss=f"{train_loss:.4f}")

        seconds = time.perf_counter() - start
        val_loss, metrics = evaluate(model, val_loader, normalize, device)
        errors.require_finite(val_loss, f"epoch {epoch}, step {step}: the validation loss")
        score = metrics["mAP50"]  # yours: the score; best.pt is the epoch with the highest score
        lr = optimizer.param_groups[0]["lr"]
        scheduler.step()  # yours: the scheduler's step, on all ranks; you can pass val_loss or score
        is_best, best_score = score > best_score, max(best_score, score)
        content = checkpoint.collect(state, epoch=epoch, score=score, best_score=best_score)

        # Write one file under several names; last.pt comes last, because it marks the epoch as done
        names = ["best.pt"] if is_best else []
        if args.save_every and epoch % args.save_every == 0:
            names.append(f"epoch-{epoch:03}.pt")
        checkpoint.save_checkpoint(folder / "last.pt", content, names)

        speed = len(train_loader) * args.batch_size / seconds
        shown = {"loss": train_loss, "val_loss": val_loss, **metrics}
        scalars = shown | {"learning_rate": lr, "seconds": seconds, "images_per_second": speed}
        for name, value in scalars.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()
        print(f"epoch {epoch:3}/{args.epochs}  {cli.show(shown)}  lr {lr:.5f}  {seconds:.2f} s  "
              f"{speed:,.0f} images/s{devices.peak_memory(device)}")

        # Draw the true and the predicted boxes of validation images
        if epoch == args.epochs:
            data.save_detections(folder / "detections.png", val_set, lambda images: yolov3.detect(
                model(normalize(images.to(device)))))


if __name__ == "__main__":
    with cli.report_errors():
        args = parse_args()
        main(args)
