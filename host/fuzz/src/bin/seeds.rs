//! Writes the seeds of all targets below a directory, as libFuzzer's initial corpus. Prints the
//! names of the targets.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::{env, fs, io};

use statehouse_fuzz::TARGETS;

fn main() -> io::Result<()> {
    let directory = env::args_os()
        .nth(1)
        .map(PathBuf::from)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "usage: seeds DIRECTORY"))?;
    for target in &TARGETS {
        let directory = directory.join(target.name);
        fs::create_dir_all(&directory)?;
        for (number, seed) in (target.seeds)().iter().enumerate() {
            fs::write(directory.join(format!("seed-{number}")), seed)?;
        }
        println!("{}", target.name);
    }
    Ok(())
}
