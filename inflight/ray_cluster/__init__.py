"""Engines on the machines of a Ray cluster. This is the only package that imports Ray, and only when it is used."""

from inflight.ray_cluster.cluster import ClusterShares, RayCluster

__all__ = ["ClusterShares", "RayCluster"]
