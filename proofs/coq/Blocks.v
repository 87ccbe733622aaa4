(* Coordinates in blocks: blk j is the block of coordinate j, proj blk i keeps block i and zeroes the rest.
   A cycle is p steps in which every coordinate's block is visited exactly once, in any order. *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality.
From LCSB Require Import FinSum Vectors.
Open Scope R_scope.

Definition proj (blk : nat -> nat) (i : nat) (v : vec) : vec :=
  fun j => if Nat.eqb (blk j) i then v j else 0.

(* b t : the block of step t; the p steps from step s on *)
Definition visits_once (n : nat) (blk b : nat -> nat) (s p : nat) : Prop :=
  forall j, (j < n)%nat -> exists i, (i < p)%nat /\ b (s + i)%nat = blk j /\
    forall k, (k < p)%nat -> b (s + k)%nat = blk j -> k = i.

(* the natural order: block i at step i of each cycle *)
Lemma cyclic_visits_once n blk b p k : (forall j, (j < n)%nat -> (blk j < p)%nat) ->
  (forall i, (i < p)%nat -> b (k * p + i)%nat = i) -> visits_once n blk b (k * p) p.
Proof.
  intros Hb Hc j Hj. exists (blk j). split; [auto|]. split; [apply Hc; auto|].
  intros i Hi E. rewrite Hc in E by exact Hi. exact E.
Qed.

Lemma dot_proj n blk i u v : dot n (proj blk i u) v = dot n (proj blk i u) (proj blk i v).
Proof.
  apply psum_ext. intros j _. unfold proj. destruct (Nat.eqb (blk j) i); ring.
Qed.

Lemma dot_proj_r n blk i u v : dot n u (proj blk i v) = dot n (proj blk i u) (proj blk i v).
Proof. rewrite dot_comm, dot_proj. apply dot_comm. Qed.

Lemma nrm_proj_le n blk i v : nrm n (proj blk i v) <= nrm n v.
Proof.
  apply nrm_le_of_sq; [apply nrm_nonneg|]. rewrite nrm_sq. apply psum_le.
  intros j _. unfold proj. destruct (Nat.eqb (blk j) i); nra.
Qed.

Lemma proj_axpy blk i x a y : proj blk i (axpy x a y) = axpy (proj blk i x) a (proj blk i y).
Proof.
  apply functional_extensionality. intros j. unfold proj, axpy.
  destruct (Nat.eqb (blk j) i); ring.
Qed.

Lemma proj_vsub blk i x y : proj blk i (vsub x y) = vsub (proj blk i x) (proj blk i y).
Proof.
  apply functional_extensionality. intros j. unfold proj, vsub.
  destruct (Nat.eqb (blk j) i); ring.
Qed.

Lemma proj_proj blk i v : proj blk i (proj blk i v) = proj blk i v.
Proof.
  apply functional_extensionality. intros j. unfold proj. destruct (Nat.eqb (blk j) i); reflexivity.
Qed.

(* Pythagoras: the blocks of one cycle make up the whole vector. *)
Theorem cycle_pythagoras n blk b s p v : visits_once n blk b s p ->
  psum (fun i => nrm n (proj blk (b (s + i)%nat) v) ^ 2) p = nrm n v ^ 2.
Proof.
  intros H. rewrite nrm_sq.
  rewrite (psum_ext _ (fun i => psum (fun j => if Nat.eqb (blk j) (b (s + i)%nat) then v j * v j else 0) n)).
  - rewrite psum_exchange. apply psum_ext. intros j Hj.
    destruct (H j Hj) as [i [Hi [E U]]].
    rewrite (psum_one _ p i Hi); [rewrite E, Nat.eqb_refl; reflexivity|].
    intros k Hk Hne. destruct (Nat.eqb_spec (blk j) (b (s + k)%nat)) as [F|_]; [|reflexivity].
    exfalso. apply Hne, U; auto.
  - intros i _. rewrite nrm_sq. apply psum_ext. intros j _. unfold proj.
    destruct (Nat.eqb (blk j) (b (s + i)%nat)); ring.
Qed.
