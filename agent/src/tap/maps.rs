//! Reads `/proc/<pid>/maps`: which files a process has mapped, and where.
//!
//! The text comes from processes of other tenants, so only the fields that the kernel writes itself are
//! split; the path is the rest of the line, whatever it holds (spaces, ` (deleted)`, bytes that are no
//! UTF-8). The kernel escapes newlines alone (`\012`, `show_map_vma` in `fs/proc/task_mmu.c`).

use std::{
    borrow::Cow,
    io::{self, Read},
};

/// Most bytes read of one process's maps: a serving process has some thousand lines of about 150 bytes.
const MAX_BYTES: u64 = 64 << 20;

/// One line of `/proc/<pid>/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping<'a> {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Whether code may run from it.
    pub exec: bool,
    /// Offset in the file at `start`, in bytes.
    pub offset: u64,
    /// Device of the file, (major, minor) as the kernel prints it.
    pub device: (u32, u32),
    /// Inode of the file; 0: no file.
    pub inode: u64,
    /// Path as the kernel prints it, without its newline escapes; empty: anonymous. A file that is gone has
    /// ` (deleted)` appended, but a file may also be named so: never decide by it.
    pub path: Cow<'a, [u8]>,
}

impl Mapping<'_> {
    /// Name of this mapping under `/proc/<pid>/map_files`.
    #[must_use]
    pub fn map_files_name(&self) -> String {
        format!("{:x}-{:x}", self.start, self.end)
    }

    /// Whether a byte of the file, by its offset, is mapped here.
    #[must_use]
    pub fn covers(&self, file_offset: u64) -> bool {
        file_offset
            .checked_sub(self.offset)
            .is_some_and(|into| into < self.end.saturating_sub(self.start))
    }
}

/// The text of a process's maps.
pub fn read(pid: u32) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    std::fs::File::open(format!("/proc/{pid}/maps"))?
        .take(MAX_BYTES)
        .read_to_end(&mut text)?;
    Ok(text)
}

/// The mappings of a process, in order of address. Lines that are not laid out as the kernel's are left out.
pub fn parse(text: &[u8]) -> impl Iterator<Item = Mapping<'_>> {
    text.split(|&b| b == b'\n').filter_map(parse_line)
}

/// `start-end perms offset major:minor inode      path`, numbers in hex but for the inode.
fn parse_line(line: &[u8]) -> Option<Mapping<'_>> {
    let (range, rest) = field(line, b' ')?;
    let (perms, rest) = field(rest, b' ')?;
    let (offset, rest) = field(rest, b' ')?;
    let (device, rest) = field(rest, b' ')?;
    // An anonymous mapping may end behind the inode.
    let (inode, rest) = field(rest, b' ').unwrap_or((rest, b""));
    let (start, end) = field(range, b'-')?;
    let (major, minor) = field(device, b':')?;
    let (start, end) = (number(start, 16)?, number(end, 16)?);
    if start >= end || perms.len() != 4 {
        return None;
    }
    // The kernel pads with spaces up to the path, and no path begins with one.
    let pad = rest.iter().take_while(|&&b| b == b' ').count();
    Some(Mapping {
        start,
        end,
        exec: perms.get(2) == Some(&b'x'),
        offset: number(offset, 16)?,
        device: (
            u32::try_from(number(major, 16)?).ok()?,
            u32::try_from(number(minor, 16)?).ok()?,
        ),
        inode: number(inode, 10)?,
        path: unescape(rest.get(pad..)?),
    })
}

fn field(text: &[u8], end: u8) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|&b| b == end)?;
    Some((text.get(..at)?, text.get(at + 1..)?))
}

fn number(digits: &[u8], radix: u32) -> Option<u64> {
    // `from_str_radix` takes a sign, the kernel prints none.
    if !digits.first()?.is_ascii_hexdigit() {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, radix).ok()
}

/// Undoes `\012`. A backslash itself is not escaped by the kernel, so a file with these four characters in
/// its name reads as one with a newline: such a path fails the device and inode check when it is opened by
/// name.
fn unescape(path: &[u8]) -> Cow<'_, [u8]> {
    const NEWLINE: &[u8] = b"\\012";
    if !path.windows(NEWLINE.len()).any(|w| w == NEWLINE) {
        return Cow::Borrowed(path);
    }
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((&first, behind)) = rest.split_first() {
        if let Some(behind) = rest.strip_prefix(NEWLINE) {
            out.push(b'\n');
            rest = behind;
        } else {
            out.push(first);
            rest = behind;
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::plain(
        b"7f00-8f00 r-xp 00001000 fe:01 42                         /usr/lib/libzmq.so.5",
        true,
        42,
        b"/usr/lib/libzmq.so.5"
    )]
    #[case::not_executable(
        b"7f00-8f00 r--p 00001000 fe:01 42                         /usr/lib/libzmq.so.5",
        false,
        42,
        b"/usr/lib/libzmq.so.5"
    )]
    #[case::spaces(
        b"7f00-8f00 r-xp 00001000 fe:01 42                         /a b/ c  d.so",
        true,
        42,
        b"/a b/ c  d.so"
    )]
    #[case::spaces_at_end(
        b"7f00-8f00 r-xp 00001000 fe:01 42                         /a  ",
        true,
        42,
        b"/a  "
    )]
    #[case::deleted_suffix(
        b"7f00-8f00 r-xp 00001000 fe:01 42                         /a.so (deleted)",
        true,
        42,
        b"/a.so (deleted)"
    )]
    #[case::deleted_twice(
        b"7f00-8f00 r-xp 00001000 fe:01 42                         /a.so (deleted) (deleted)",
        true,
        42,
        b"/a.so (deleted) (deleted)"
    )]
    #[case::newline(
        b"7f00-8f00 r-xp 00001000 fe:01 42                         /a\\012b\\012",
        true,
        42,
        b"/a\nb\n"
    )]
    #[case::not_utf8(
        b"7f00-8f00 r-xp 00001000 fe:01 42                         /\xff\xfe.so",
        true,
        42,
        b"/\xff\xfe.so"
    )]
    #[case::looks_like_a_line(
        b"7f00-8f00 r-xp 00001000 fe:01 42                         /x 7f00-8f00 r-xp 0 fe:01 7 /etc/passwd",
        true,
        42,
        b"/x 7f00-8f00 r-xp 0 fe:01 7 /etc/passwd"
    )]
    #[case::memfd(
        b"7f00-8f00 r-xp 00001000 00:01 42                         /memfd:a b (deleted)",
        true,
        42,
        b"/memfd:a b (deleted)"
    )]
    #[case::long_name_has_one_space(b"7f00-8f00 r-xp 00001000 fe:01 42 /a", true, 42, b"/a")]
    #[case::anonymous(b"7f00-8f00 r-xp 00001000 00:00 0 ", true, 0, b"")]
    #[case::anonymous_without_space(b"7f00-8f00 r-xp 00001000 00:00 0", true, 0, b"")]
    #[case::heap(
        b"7f00-8f00 r-xp 00001000 00:00 0                          [heap]",
        true,
        0,
        b"[heap]"
    )]
    fn lines(#[case] line: &[u8], #[case] exec: bool, #[case] inode: u64, #[case] path: &[u8]) {
        let all: Vec<_> = parse(line).collect();
        assert_eq!(all.len(), 1);
        let mapping = &all[0];
        assert_eq!(
            (mapping.start, mapping.end, mapping.offset),
            (0x7f00, 0x8f00, 0x1000)
        );
        assert_eq!(
            (mapping.exec, mapping.inode, mapping.path.as_ref()),
            (exec, inode, path)
        );
        assert_eq!(mapping.map_files_name(), "7f00-8f00");
    }

    #[rstest]
    #[case::empty(b"")]
    #[case::no_range(b"7f00 r-xp 00001000 fe:01 42 /a")]
    #[case::backwards(b"8f00-7f00 r-xp 00001000 fe:01 42 /a")]
    #[case::sign(b"+7f00-8f00 r-xp 00001000 fe:01 42 /a")]
    #[case::too_large(b"17f00000000000000-27f00000000000000 r-xp 0 fe:01 42 /a")]
    #[case::short_permissions(b"7f00-8f00 rx 00001000 fe:01 42 /a")]
    #[case::inode_in_hex(b"7f00-8f00 r-xp 00001000 fe:01 4f /a")]
    #[case::cut_short(b"7f00-8f00 r-xp 00001000 fe:")]
    fn rejected(#[case] line: &[u8]) {
        assert_eq!(parse(line).count(), 0);
    }

    #[rstest]
    #[case::first(0x1000, true)]
    #[case::last(0x1fff, true)]
    #[case::behind(0x2000, false)]
    #[case::before(0xfff, false)]
    fn coverage(#[case] offset: u64, #[case] covered: bool) {
        let mapping = parse(b"7f00-8f00 r-xp 00001000 fe:01 42 /a").next().unwrap();
        assert_eq!(mapping.covers(offset), covered);
    }

    #[test]
    fn own_maps_hold_this_executable() {
        use std::os::unix::{ffi::OsStrExt, fs::MetadataExt};
        let exe = std::fs::read_link("/proc/self/exe").unwrap();
        let inode = std::fs::metadata(&exe).unwrap().ino();
        let text = read(std::process::id()).unwrap();
        assert_eq!(
            parse(&text).count(),
            text.split_inclusive(|&b| b == b'\n').count(),
            "every line is understood"
        );
        assert!(
            parse(&text).any(|m| m.exec && m.inode == inode && m.path.as_ref() == exe.as_os_str().as_bytes())
        );
    }

    proptest! {
        #[test]
        fn any_bytes(text in proptest::collection::vec(any::<u8>(), 0..400)) {
            for mapping in parse(&text) {
                prop_assert!(mapping.start < mapping.end);
            }
        }

        /// Any file name, written as the kernel writes it, comes back whole and leaves the other fields
        /// alone.
        #[test]
        fn any_name(name in proptest::collection::vec(1_u8..=255, 1..80), inode in 1_u64.., start in 1_u64..1 << 47) {
            // The four characters `\012` can't be told from an escaped newline (see `unescape`).
            prop_assume!(!name.windows(4).any(|w| w == b"\\012"));
            let mut line = format!("{start:08x}-{:08x} r-xp 00000000 08:02 {inode} ", start + 4096).into_bytes();
            line.resize(73, b' ');
            line.push(b'/');
            for &byte in &name {
                if byte == b'\n' { line.extend(b"\\012") } else { line.push(byte) }
            }
            line.push(b'\n');
            let all: Vec<_> = parse(&line).collect();
            prop_assert_eq!(all.len(), 1);
            prop_assert_eq!(&all[0].path[1..], &name[..]);
            prop_assert_eq!((all[0].inode, all[0].start, all[0].device), (inode, start, (8, 2)));
        }
    }
}
