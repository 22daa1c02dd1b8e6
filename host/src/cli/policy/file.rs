//! A policy's file, as commands are given one.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::cli::output::Failure;
use crate::{STANDARD_POLICY, limits};

/// Reads it, unless it is larger than a policy can be. `builtin` is the standard policy.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    if path.as_os_str() == "builtin" {
        return Ok(STANDARD_POLICY.to_vec());
    }
    let unreadable = |error: std::io::Error| {
        Failure::usage(format!(
            "cannot read the policy {}: {error}",
            path.display()
        ))
    };
    let file = File::open(path).map_err(unreadable)?;
    let bytes = file.metadata().map_err(unreadable)?.len();
    let mut module = Vec::new();
    if bytes <= limits::POLICY_FILE_BYTES_MAX {
        // It may grow meanwhile, or be no regular file.
        file.take(limits::POLICY_FILE_BYTES_MAX + 1)
            .read_to_end(&mut module)
            .map_err(unreadable)?;
    }
    let bytes = bytes.max(module.len() as u64);
    if bytes > limits::POLICY_FILE_BYTES_MAX {
        return Err(Failure::usage(format!(
            "the policy {} has {bytes} bytes, and a policy at most {}",
            path.display(),
            limits::POLICY_FILE_BYTES_MAX
        )));
    }
    Ok(module)
}
