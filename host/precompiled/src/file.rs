//! Reads the file of a policy from any path.
//!
//! Must never read more than [`POLICY_FILE_BYTES_MAX`] and one byte: the path may name a device or
//! a pipe without end.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::POLICY_FILE_BYTES_MAX;

/// Reads a file.
///
/// # Errors
/// If the file cannot be read, or is larger than [`POLICY_FILE_BYTES_MAX`].
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let max = POLICY_FILE_BYTES_MAX;
    let file = File::open(path)?;
    let mut length = file.metadata()?.len();
    let mut bytes = Vec::new();
    if length <= max {
        // The file may grow while it is read, or be a pipe.
        file.take(max + 1).read_to_end(&mut bytes)?;
        length = bytes.len() as u64;
    }
    if length > max {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has {length} bytes, and a policy at most {max}"),
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_and_too_large_files_are_refused() {
        let error = read_file(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("large");
        let max = POLICY_FILE_BYTES_MAX;
        let file = File::create(&path).unwrap();
        file.set_len(max + 1).unwrap();
        let says = read_file(&path).unwrap_err().to_string();
        assert_eq!(
            says,
            format!("it has {} bytes, and a policy at most {max}", max + 1)
        );
        file.set_len(max).unwrap();
        assert_eq!(read_file(&path).unwrap().len() as u64, max);
    }
}
