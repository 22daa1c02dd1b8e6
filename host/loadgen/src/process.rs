//! What a process of this machine uses. Linux only: it reads /proc, and elsewhere it knows nothing.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// Ticks of /proc in a second (proc(5)): Linux tells all programs this many, whatever the kernel uses inside.
const TICKS_PER_SECOND: u64 = 100;

/// What a process has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Time on processors since its start, to 10 ms.
    pub cpu: Duration,
    /// Bytes in memory now.
    pub resident: u64,
}

impl Usage {
    /// Of a process; `None` where there is none, or it is not to be seen.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in brackets, may hold anything.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let user: u64 = fields.nth(11)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let resident = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))?;
        let kib: u64 = resident.split_whitespace().next()?.parse().ok()?;
        Some(Self {
            cpu: Duration::from_millis((user + system) * 1000 / TICKS_PER_SECOND),
            resident: kib << 10,
        })
    }
}

/// The process that listens at an address of this machine, and its name, if this account may see it.
#[must_use]
pub fn listener(address: SocketAddr) -> Option<(u32, String)> {
    let table = match address {
        SocketAddr::V4(_) => "/proc/net/tcp",
        SocketAddr::V6(_) => "/proc/net/tcp6",
    };
    let table = fs::read_to_string(table).ok()?;
    holder(listening(&table, address)?)
}

/// The same of a socket of the file system, by the path that it was made at.
pub fn socket_listener(path: &Path) -> Option<(u32, String)> {
    let table = fs::read_to_string("/proc/net/unix").ok()?;
    // Number, references, protocol, flags, type, state, inode, path.
    let inode = table.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (flags, inode) = (fields.nth(3)?, fields.nth(2)?);
        let at = &line[line.find('/')?..];
        let listens = u32::from_str_radix(flags, 16).ok()? & ACCEPTS != 0;
        (listens && Path::new(at) == path).then(|| inode.parse().ok())?
    });
    holder(inode?)
}

/// Of the flags of a socket (`__SO_ACCEPTCON` of Linux): it listens.
const ACCEPTS: u32 = 0x1_0000;

/// The process that has this socket open, and its name.
fn holder(socket: u64) -> Option<(u32, String)> {
    let socket = format!("socket:[{socket}]");
    for entry in fs::read_dir("/proc").ok()?.map_while(Result::ok) {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let Ok(files) = fs::read_dir(entry.path().join("fd")) else {
            continue;
        };
        let mut links = files
            .map_while(Result::ok)
            .filter_map(|it| fs::read_link(it.path()).ok());
        if links.any(|link| link.as_os_str() == socket.as_str()) {
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            return Some((pid, name.trim_end().to_owned()));
        }
    }
    None
}

/// The socket in a table of /proc/net that listens there, or at all addresses with this port.
fn listening(table: &str, address: SocketAddr) -> Option<u64> {
    let port = address.port();
    let exact = match address {
        SocketAddr::V4(it) => format!("{:08X}:{port:04X}", u32::from_ne_bytes(it.ip().octets())),
        SocketAddr::V6(it) => {
            let octets = it.ip().octets();
            let words = octets.as_chunks::<4>().0.iter();
            let words: String = words
                .map(|word| format!("{:08X}", u32::from_ne_bytes(*word)))
                .collect();
            format!("{words}:{port:04X}")
        }
    };
    let any = format!("{}:{port:04X}", "0".repeat(exact.len() - 5));
    let find = |wanted: &str| {
        table.lines().find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // 0A is LISTEN; the tenth field is the inode.
            let found = fields.get(1) == Some(&wanted) && fields.get(3) == Some(&"0A");
            found.then(|| fields.get(9)?.parse().ok()).flatten()
        })
    };
    find(&exact).or_else(|| find(&any))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn this_process_is_found_by_what_it_listens_on() {
        for address in ["127.0.0.1:0", "127.9.8.7:0", "0.0.0.0:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let mut address = listener.local_addr().unwrap();
            if address.ip().is_unspecified() {
                address.set_ip([127, 0, 0, 1].into());
            }
            let (pid, name) = super::listener(address).unwrap();
            assert_eq!(pid, std::process::id(), "{name}");
        }
    }

    #[test]
    fn this_process_is_found_by_the_socket_that_it_listens_at() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a socket");
        let listener = UnixListener::bind(&path).unwrap();
        let found = socket_listener(&path).unwrap();
        assert_eq!(found.0, std::process::id(), "{}", found.1);
        assert_eq!(socket_listener(&directory.path().join("a")), None);
        drop(listener);
        assert_eq!(socket_listener(&path), None);
    }

    #[test]
    fn nobody_is_found_where_nobody_listens() {
        // Held, and not listened on at that address.
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut address = other.local_addr().unwrap();
        address.set_ip([127, 1, 2, 3].into());
        assert_eq!(listener(address), None);
    }

    #[test]
    fn work_and_memory_are_seen() {
        let before = Usage::of(std::process::id()).unwrap();
        let end = std::time::Instant::now() + Duration::from_millis(60);
        let mut sum = 0_u64;
        while std::time::Instant::now() < end {
            sum = std::hint::black_box(sum + 1);
        }
        let after = Usage::of(std::process::id()).unwrap();
        assert!(
            after.cpu > before.cpu && after.resident > 1 << 20,
            "{before:?} {after:?}"
        );
        assert_eq!(Usage::of(u32::MAX), None);
    }
}
