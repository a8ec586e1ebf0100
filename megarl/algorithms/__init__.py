"""The maths of RL: pure functions of flat [T] tensors, independent of any backend."""
