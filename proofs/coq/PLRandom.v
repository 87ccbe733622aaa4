(* T3, random blocks: one of p blocks uniformly at each step, exact gradients. expected T x is the mean of f
   over all p^T equally likely runs of T steps from x; it contracts by 1 - 2 mu eta (1 - eta L_max/2)/p a step. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum Vectors Blocks BlockDescent PLCyclic.
Open Scope R_scope.

Fixpoint expected (p : nat) (blk : nat -> nat) (f : vec -> R) (grad : vec -> vec) (eta : R) (T : nat) (x : vec) : R :=
  match T with
  | O => f x
  | S k => psum (fun i => expected p blk f grad eta k (axpy x (- eta) (proj blk i (grad x)))) p / INR p
  end.

Theorem pl_random : forall n p blk f grad (Li : nat -> R) Lmax eta mu fmin,
  (0 < p)%nat -> (forall j, (j < n)%nat -> (blk j < p)%nat) ->
  block_smooth n blk f grad Li -> (forall i, Li i <= Lmax) -> 0 < eta -> eta * Lmax < 2 ->
  pl n f grad mu fmin -> 0 <= 2 * mu * (eta * (1 - eta * Lmax / 2)) / INR p <= 1 ->
  forall T x, expected p blk f grad eta T x - fmin
    <= (1 - 2 * mu * (eta * (1 - eta * Lmax / 2)) / INR p) ^ T * (f x - fmin).
Proof.
  intros n p blk f grad Li Lmax eta mu fmin Hp Hb Hs HLi He small Hpl Hr.
  assert (P : 0 < INR p) by (apply lt_0_INR; exact Hp).
  set (r := 2 * mu * (eta * (1 - eta * Lmax / 2)) / INR p) in *.
  induction T as [|T IH]; intros x; [simpl; lra|].
  set (y := fun i => axpy x (- eta) (proj blk i (grad x))).
  assert (M : psum (fun i => f (y i) - fmin) p / INR p <= (1 - r) * (f x - fmin)).
  { assert (V : psum (fun i => nrm n (proj blk i (grad x)) ^ 2) p = nrm n (grad x) ^ 2).
    { apply (cycle_pythagoras n blk (fun i => i) 0).
      intros j Hj. exists (blk j). split; [apply Hb; exact Hj|]. split; [reflexivity|]. intros k _ E. exact E. }
    apply Rmult_le_reg_r with (INR p); [exact P|]. unfold Rdiv. rewrite Rmult_assoc, Rinv_l, Rmult_1_r by lra.
    apply Rle_trans with (INR p * (f x - fmin) - eta * (1 - eta * Lmax / 2) * nrm n (grad x) ^ 2).
    - rewrite <- V, <- psum_scal, <- psum_const.
      apply Rle_trans with (psum (fun i => (f x - fmin) + - (eta * (1 - eta * Lmax / 2)) * nrm n (proj blk i (grad x)) ^ 2) p).
      + apply psum_le. intros i _. pose proof (Hs i x (- eta) (grad x)) as S. fold (y i) in S.
        rewrite <- nrm_sq in S. pose proof (pow2_ge_0 (nrm n (proj blk i (grad x)))).
        assert (Li i / 2 * (- eta) ^ 2 * nrm n (proj blk i (grad x)) ^ 2
                <= Lmax / 2 * eta ^ 2 * nrm n (proj blk i (grad x)) ^ 2).
        { replace ((- eta) ^ 2) with (eta ^ 2) by ring. apply Rmult_le_compat_r; [assumption|].
          apply Rmult_le_compat_r; [apply pow2_ge_0|]. specialize (HLi i). lra. }
        lra.
      + rewrite psum_plus, !psum_scal. lra.
    - specialize (Hpl x). apply (Rmult_le_compat_l (eta * (1 - eta * Lmax / 2))) in Hpl;
        [|apply Rmult_le_pos; lra].
      replace ((1 - r) * (f x - fmin) * INR p)
        with (INR p * (f x - fmin) - eta * (1 - eta * Lmax / 2) * (2 * mu * (f x - fmin)))
        by (unfold r; field; lra).
      lra. }
  apply (Rmult_le_compat_l ((1 - r) ^ T)) in M; [|apply pow_le; lra].
  replace ((1 - r) ^ S T * (f x - fmin)) with ((1 - r) ^ T * ((1 - r) * (f x - fmin))) by (simpl; ring).
  eapply Rle_trans; [|exact M].
  change (psum (fun i => expected p blk f grad eta T (y i)) p / INR p - fmin
    <= (1 - r) ^ T * (psum (fun i => f (y i) - fmin) p / INR p)).
  replace (psum (fun i => expected p blk f grad eta T (y i)) p / INR p - fmin)
    with (psum (fun i => expected p blk f grad eta T (y i) - fmin) p / INR p).
  - replace ((1 - r) ^ T * (psum (fun i => f (y i) - fmin) p / INR p))
      with (psum (fun i => (1 - r) ^ T * (f (y i) - fmin)) p / INR p) by (rewrite psum_scal; field; lra).
    apply Rmult_le_compat_r; [left; apply Rinv_0_lt_compat; exact P|].
    apply psum_le. intros i _. apply IH.
  - rewrite (psum_ext _ (fun i => expected p blk f grad eta T (y i) + - fmin)) by (intros; ring).
    rewrite psum_plus, psum_const. field. lra.
Qed.
