//! Container id and pod uid from a process's cgroup paths: v1, v2 and hybrid, of every common runtime.

use super::identity::Container;

/// Unit names that a runtime puts before the container id. Longer ones first where one begins another.
const PREFIXES: &[&str] = &[
    "cri-containerd-",
    "containerd-",
    "docker-",
    "crio-",
    "libpod-payload-",
    "libpod-",
    "nerdctl-",
    "lxc.payload.",
];

/// Reads `/proc/<pid>/cgroup`. `None`: no path names a container, as on the bare host or where a cgroup namespace
/// hides the path (`/`).
///
/// The path is text that a container's root can shape below its own delegated part. It is shown, never used as a
/// label or a file name.
#[must_use]
pub fn from_cgroup(text: &str) -> Option<Container> {
    // `id:controllers:path`; the path is the rest of the line and may hold colons (`cri-containerd:<id>`).
    text.lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .find_map(from_path)
}

fn from_path(path: &str) -> Option<Container> {
    let mut id = None;
    let mut pod_uid = None;
    for segment in path.split('/') {
        // The outermost id counts: what a container nests below its own cgroup is its own business. But the node
        // of a nested cluster (kind, k3d) is a container too, and the pod's is the one that people look for.
        if let Some(uid) = pod(segment) {
            (id, pod_uid) = (None, Some(uid));
        }
        if id.is_none() {
            id = container_id(segment);
        }
    }
    id.map(|id| Container { id, pod_uid })
}

/// The id in one segment: bare, or as a unit (`docker-<id>.scope`, `kubepods-...:cri-containerd:<id>`).
fn container_id(segment: &str) -> Option<String> {
    let segment = segment.rsplit(':').next().unwrap_or(segment);
    let unit = segment
        .strip_suffix(".scope")
        .or_else(|| segment.strip_suffix(".service"))
        .unwrap_or(segment);
    let id = PREFIXES
        .iter()
        .find_map(|prefix| unit.strip_prefix(prefix))
        .unwrap_or(unit);
    is_id(id).then(|| id.to_owned())
}

/// 64 hex digits, or the 32 hex digits and a number of a Fargate task.
fn is_id(text: &str) -> bool {
    let hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    match text.len() {
        64 => hex(text),
        34..=43 => text.split_once('-').is_some_and(|(task, number)| {
            task.len() == 32 && hex(task) && number.bytes().all(|b| b.is_ascii_digit())
        }),
        _ => false,
    }
}

/// The pod uid of `pod<uid>` or of a slice such as `kubepods-burstable-pod<uid>.slice`, where systemd takes
/// underscores (or the escape `\x2d`) for dashes.
fn pod(segment: &str) -> Option<String> {
    let segment = segment.split(':').next().unwrap_or(segment);
    let segment = segment
        .strip_suffix(".slice")
        .unwrap_or(segment)
        .replace("\\x2d", "-");
    let start = if segment.starts_with("pod") {
        3
    } else {
        segment.rfind("-pod")? + 4
    };
    let uid = segment.get(start..)?.replace('_', "-");
    is_uid(&uid).then_some(uid)
}

/// A UUID, or the 32 hex digits of a static pod.
fn is_uid(text: &str) -> bool {
    let groups: Vec<usize> = text.split('-').map(str::len).collect();
    (groups == [8, 4, 4, 4, 12] || groups == [32]) && text.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const ID: &str = "3f1ac4b0e5d8429b9f0c7a6d5e4b3c2a1908f7e6d5c4b3a29180716253445566";
    const OTHER: &str = "aa1ac4b0e5d8429b9f0c7a6d5e4b3c2a1908f7e6d5c4b3a29180716253445577";
    const UID: &str = "6f1d2a34-9b7c-4e21-8c55-0a1b2c3d4e5f";

    #[rstest]
    #[case::docker_v1(&format!("12:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}"), None)]
    #[case::docker_v2_systemd(&format!("0::/system.slice/docker-{ID}.scope"), None)]
    #[case::docker_with_init_below(&format!("0::/system.slice/docker-{ID}.scope/init.scope"), None)]
    #[case::podman_rootful(&format!("0::/machine.slice/libpod-{ID}.scope/container"), None)]
    #[case::podman_rootless(
        &format!("0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"), None)]
    #[case::podman_in_pod(
        &format!("0::/machine.slice/machine-libpod_pod_{OTHER}.slice/libpod-{ID}.scope/container"), None)]
    #[case::nerdctl(&format!("0::/system.slice/nerdctl-{ID}.scope"), None)]
    #[case::containerd_plain(&format!("0::/default/{ID}"), None)]
    #[case::kube_containerd_systemd_v2(
        &format!("0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice/cri-containerd-{ID}.scope",
            UID.replace('-', "_")), Some(UID))]
    #[case::kube_guaranteed(
        &format!("0::/kubepods.slice/kubepods-pod{}.slice/cri-containerd-{ID}.scope", UID.replace('-', "_")),
        Some(UID))]
    #[case::kube_crio(
        &format!("0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{}.slice/crio-{ID}.scope/container",
            UID.replace('-', "_")), Some(UID))]
    #[case::kube_crio_without_scope(
        &format!("0::/kubepods.slice/kubepods-pod{}.slice/crio-{ID}", UID.replace('-', "_")), Some(UID))]
    #[case::kube_cgroupfs_v1(
        &format!("11:cpu,cpuacct:/kubepods/burstable/pod{UID}/{ID}\n3:pids:/kubepods/burstable/pod{UID}/{ID}"), Some(UID))]
    #[case::kube_docker_v1(
        &format!("4:devices:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice/docker-{ID}.scope",
            UID.replace('-', "_")), Some(UID))]
    #[case::kube_systemd_driver_mismatch(
        &format!("0::/system.slice/containerd.service/kubepods-burstable-pod{}.slice:cri-containerd:{ID}",
            UID.replace('-', "_")), Some(UID))]
    #[case::kube_escaped_dashes(
        &format!("0::/kubepods.slice/kubepods-pod{}.slice/cri-containerd-{ID}.scope", UID.replace('-', "\\x2d")),
        Some(UID))]
    #[case::kubelet_root(
        &format!("0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{}.slice/cri-containerd-{ID}.scope",
            UID.replace('-', "_")), Some(UID))]
    #[case::static_pod(
        &format!("0::/kubepods/burstable/pod0123456789abcdef0123456789abcdef/{ID}"),
        Some("0123456789abcdef0123456789abcdef"))]
    #[case::hybrid_v2_line_bare(
        &format!("12:memory:/kubepods/besteffort/pod{UID}/{ID}\n0::/"), Some(UID))]
    #[case::hybrid_v2_line_first(
        &format!("0::/system.slice/containerd.service\n5:memory:/kubepods/besteffort/pod{UID}/{ID}"), Some(UID))]
    #[case::agent_in_its_own_cgroup_namespace(
        &format!("0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{}.slice/cri-containerd-{ID}.scope",
            UID.replace('-', "_")), Some(UID))]
    #[case::kind_node_in_docker(
        &format!("0::/system.slice/docker-{OTHER}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{}.slice/cri-containerd-{ID}.scope",
            UID.replace('-', "_")), Some(UID))]
    #[case::container_makes_groups_that_look_like_containers(
        &format!("0::/system.slice/docker-{ID}.scope/docker/{OTHER}"), None)]
    #[case::pod_makes_groups_that_look_like_containers(
        &format!("0::/kubepods/burstable/pod{UID}/{ID}/docker/{OTHER}"), Some(UID))]
    #[case::ecs(&format!("9:cpu:/ecs/0123456789abcdef0123456789abcdef/{ID}"), None)]
    fn names_the_container(#[case] text: &str, #[case] pod_uid: Option<&str>) {
        let found = from_cgroup(text);
        assert_eq!(
            found,
            Some(Container {
                id: ID.to_owned(),
                pod_uid: pod_uid.map(str::to_owned)
            })
        );
    }

    #[rstest]
    #[case::fargate(
        "1:name=systemd:/ecs/task/0123456789abcdef0123456789abcdef-4054872355",
        "0123456789abcdef0123456789abcdef-4054872355"
    )]
    fn names_other_ids(#[case] text: &str, #[case] id: &str) {
        assert_eq!(from_cgroup(text).map(|found| found.id).as_deref(), Some(id));
    }

    #[rstest]
    #[case::private_namespace("0::/")]
    #[case::private_namespace_v1("12:memory:/\n1:name=systemd:/\n0::/")]
    #[case::host_service("0::/system.slice/sshd.service")]
    #[case::user_session("0::/user.slice/user-0.slice/session-4.scope")]
    #[case::conmon(&format!("0::/machine.slice/libpod-conmon-{ID}.scope"))]
    #[case::crio_conmon(&format!("0::/kubepods.slice/crio-conmon-{ID}.scope"))]
    #[case::short_id("0::/docker/3f1ac4b0e5d8")]
    #[case::not_hex("0::/docker/zz1ac4b0e5d8429b9f0c7a6d5e4b3c2a1908f7e6d5c4b3a29180716253445566")]
    #[case::pod_without_container("0::/kubepods/burstable/pod6f1d2a34-9b7c-4e21-8c55-0a1b2c3d4e5f")]
    #[case::empty("")]
    #[case::garbage("::::\n:\n\u{0}\u{ffff}")]
    fn names_none(#[case] text: &str) {
        assert_eq!(from_cgroup(text), None);
    }

    proptest! {
        #[test]
        fn takes_any_text(text in "(.{0,40}[:/\n]){0,12}") {
            if let Some(found) = from_cgroup(&text) {
                prop_assert!(found.id.len() <= 64 && found.id.is_ascii());
            }
        }
    }
}
