//! The file of a policy, wherever it lies.
//!
//! What enters: a path. What leaves: all of the file. No more of it is read than a policy may have, whatever it is.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::POLICY_FILE_BYTES_MAX;

/// Reads it, unless it is larger than a policy can be.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let max = POLICY_FILE_BYTES_MAX;
    let file = File::open(path)?;
    let mut length = file.metadata()?.len();
    let mut bytes = Vec::new();
    if length <= max {
        // It may grow meanwhile, or be a pipe.
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
    fn what_never_ends_is_not_read_to_its_end() {
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
