"""Pods: the hooks, the stand-in kubelet, the manifests of yamls/."""
