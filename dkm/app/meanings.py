"""What the values of some settings mean, in a few words each: for --help."""

MEANINGS: dict[str, dict[str, str]] = {
    "coding": {
        "packed": "as many bits for each code as the plan says",
        "entropy": "fewer bits for frequent codes: the same weights in a smaller file, which loads more slowly",
    },
    "allocator": {
        "dkm": "by what each costs the loss",
        "hawq": "by how strongly the loss curves in each layer, as HAWQ-v2 does; a few dozen backward passes",
        "haq": "by trying hundreds of plans, from which an agent learns, as HAQ does",
    },
    "teacher": {
        "none": "from the labels",
        "self": "from the model as it was before; needs no labels, and few examples",
    },
    "batch_norm": {
        "train": "those of each batch",
        "frozen": "those of the clustered model at the start; for very small batches",
    },
    "method": {
        "dkm": "the paper's: each weight is a mixture of centroids that hardens",
        "hard": "k-means at every step, without mixtures",
        "gumbel": "like dkm, with mixtures that are drawn at random",
        "dc": "Deep Compression: k-means once, then only the centroids train",
        "quant_noise": "a random part of the weights is snapped at every step, in the end all of them",
        "bwn": "1 bit: the sign of each weight, and a scale",
        "abc-net": "a sum of binary weights, one for each bit",
        "ewgs": "evenly spaced values on a learned range",
        "atb": "like dc, with the clusters that keep the outputs of the layers",
        "soft-sharing": "a term of the loss draws the weights into clusters",
        "rps": "like soft-sharing, with the objective of k-means",
        "profit": "evenly spaced values, fewer by and by, and layers frozen one by one",
        "meta-quant": "a small network learns the gradient of a quantised weight",
        "lr-net": "1 or 2 bits: probabilities of two or three values, with noise in the outputs",
        "escq": "clusters with little error and little entropy, for entropy-coded files; then as dc",
        "gobo": "outliers stay as they are; the clusters of the others by absolute error, then as dc",
    },
    "tau": {
        "auto": "falls during the training, from 2 to 0.1 units; nothing to tune",
        "5e-5": "a number: this temperature all the time; the paper has 5e-6 to 4e-4",
        "geometric:3:0.05": "from 3 to 0.05 units; linear and cosine take the same numbers",
        "constant:1": "one unit all the time",
        "learn": "trained like a weight; for experiments only",
    },
    "gradient": {
        "unrolled": "through every iteration, as in the paper",
        "last": "through the last iteration alone: faster, less exact",
        "implicit": "as if the iterations had come to rest: solves a system of equations",
    },
    "tracker": {
        "none": "nowhere",
        "tensorboard": "for TensorBoard, in the folder of the run",
        "wandb": "for Weights & Biases; without an account, set WANDB_MODE=offline",
        "FILE.py:FUNCTION": "gets the folder, returns a GeneralTracker of Accelerate",
    },
    "augment": {
        "none": "not at all",
        "light": "flips, and crops at the scale of evaluation",
        "medium": "flips, and crops of at least 35 % of the image",
        "imagenet": "flips, and crops of at least 8 % of the image",
    },
}
