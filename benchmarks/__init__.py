"""What one clustered layer costs: time, start-up, memory, and the error of float32.

    python -m benchmarks                      everything, on the CPU (many minutes: coremltools' k-means is slow)
    python -m benchmarks --quick              a smoke test on small layers
    python -m benchmarks --only speed         one of: speed, network, packed, groups, coding, init, memory, accuracy
    python -m benchmarks --json numbers.json  write the raw numbers to a file as well
    python -m benchmarks --device cuda        on a GPU

Weights are `randn * 0.05` with a fixed seed, centroids come from `dkm.init_centroids`, tau is twice the
squared error per weight (what `tau="auto"` gives at the first step), and eps is 0 so that all iterations are made.
The contenders (`contenders.py`):

    ours         dkm.cluster, impl="auto"
    unrolled     the same mathematics in plain PyTorch, with autograd's gradient
    tuned        `unrolled`, made as fast as we could make it within autograd
    coremltools  the weight palettizer of coremltools.optimize.torch, if it is installed
"""
