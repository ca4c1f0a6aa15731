"""Tests in one process, without MPI."""
