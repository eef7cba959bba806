"""What one clustered layer costs: time, start-up, memory, and the error of float32.

    python -m benchmarks                      everything, on the CPU (many minutes: coremltools's k-means is slow)
    python -m benchmarks --quick              a smoke test on small layers
    python -m benchmarks --only speed         one of: speed, init, memory, accuracy
    python -m benchmarks --json numbers.json  the raw numbers too

Weights are `randn * 0.05` with a fixed seed, centroids come from `dkm.init_centroids`, tau is twice the
squared error per weight (the `tau="auto"` of the first step), and eps is 0 so that no iteration is saved.
The contenders (`contenders.py`):

    ours         dkm.cluster, impl="auto"
    unrolled     the same mathematics in plain PyTorch, with autograd's gradient
    tuned        `unrolled` as fast as we could write it without leaving autograd
    coremltools  the weight palettizer of coremltools.optimize.torch, if it is installed
"""
