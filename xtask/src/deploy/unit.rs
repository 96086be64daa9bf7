//! The systemd unit is one that systemd takes.

use std::{fs, process::Command};

use anyhow::{Result, ensure};

use crate::setup;

const UNIT: &str = "deploy/systemd/omnitap.service";

/// Checks it, by a copy that names a program which is there.
pub(super) fn run() -> Result<()> {
    setup::debian(&[("/usr/bin/systemd-analyze", "systemd")])?;
    let text = fs::read_to_string(setup::root().join(UNIT))?;
    let dir = tempfile::tempdir()?;
    let copy = dir.path().join("omnitap.service");
    fs::write(&copy, text.replace("/usr/bin/omnitap", "/bin/true"))?;
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .arg(&copy)
        .output()?;
    let told = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && !told.contains("omnitap.service"),
        "{told}"
    );
    println!("unit: systemd takes it");
    Ok(())
}
