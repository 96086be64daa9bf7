//! The tap with few capabilities, and what `omnitap check` says where there are none.

mod tap_support;

use omnitap::{
    check::{self, Status},
    tap::{ProbeSet, Settings, maps, site::Arch, symbol::SymbolError, target::Finder},
};
use tap_support::{Sender, again, can_run, content, copy_pyzmq, frames, load};

/// Set in the second run of this test binary, which has fewer rights.
const INNER: &str = "OMNITAP_TEST_INNER";

/// `CAP_SYS_ADMIN` for the kernel side and `map_files`, `CAP_SYS_PTRACE` for the rest of /proc.
#[test]
fn two_capabilities_suffice() {
    if std::env::var_os(INNER).is_none() {
        if can_run() {
            again("two_capabilities_suffice", "-all,+sys_admin,+sys_ptrace", INNER);
        }
        return;
    }
    assert!(check::run(None, None).works());
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::pyzmq(None);
    let _attached = tap.attach(sender.key()).unwrap();
    sender.send(1, &[100], true);
    assert_eq!(frames(&mut reader, sender.pid, 1)[0].head, content(1, 100));
}

/// Where `map_files` is denied, the file is found by its path, if that leads to the mapped file.
#[test]
fn files_are_found_by_path() {
    if std::env::var_os(INNER).is_none() {
        if can_run() {
            again("files_are_found_by_path", "-all,+sys_ptrace", INNER);
        }
        return;
    }
    let finder = Finder::new(Arch::NATIVE, ProbeSet::Frames);
    let dir = tempfile::tempdir().unwrap();
    let library = copy_pyzmq(dir.path());
    let sender = Sender::pyzmq(Some(dir.path()));
    let text = maps::read(sender.pid).unwrap();
    match finder.find(sender.pid, &text) {
        Ok(found) => assert_eq!(found[0].path, library.as_os_str().as_encoded_bytes()),
        // On overlayfs and btrfs, stat and maps name different devices, and a path proves nothing.
        Err(SymbolError::Replaced { path }) => {
            eprintln!(
                "SKIPPED: the device of {} differs between stat and maps",
                path.display()
            );
            return;
        }
        Err(e) => panic!("{e}"),
    }
    let other = dir.path().join("other");
    std::fs::copy(&library, &other).unwrap();
    std::fs::rename(&other, &library).unwrap();
    let replaced = finder.find(sender.pid, &text);
    assert!(
        matches!(replaced, Err(SymbolError::Replaced { .. })),
        "{replaced:?}"
    );
}

#[test]
fn without_rights_the_report_says_so() {
    if std::env::var_os(INNER).is_none() {
        if can_run() {
            again("without_rights_the_report_says_so", "-all", INNER);
        }
        return;
    }
    let report = check::run(None, None);
    eprintln!("{report}");
    assert!(!report.works());
    let failed = |name: &str| {
        report
            .items
            .iter()
            .any(|item| item.name == name && item.status == Status::Fail && !item.remedy.is_empty())
    };
    assert!(failed("capability") && failed("trial: load"));
}
